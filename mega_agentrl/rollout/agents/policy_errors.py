"""Exceptions of an agent that the policy causes: the attempt has ended and is scored.

Frameworks raise when the policy writes what they cannot use, or does not come to an end. If such
attempts were masked like crashes, the policy would never learn to avoid them, and the rest of the
group would be a biased sample. `KNOWN_POLICY_ERRORS` lists the classes of known frameworks,
`rollout.agent.policy_errors` adds others, and an agent of one's own raises `PolicyError`.

A class is known by its package and its name, because frameworks move classes between modules and
export them from several: `agents.MaxTurnsExceeded` is `agents.exceptions.MaxTurnsExceeded`. No
package is imported for this.
"""

from __future__ import annotations

import builtins
import re
import sys
from typing import TYPE_CHECKING

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.user_code import is_user_code, load_user_object
from mega_agentrl.rollout.agents.base import AgentCommandError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY = "rollout.agent.policy_errors"

KNOWN_POLICY_ERRORS: dict[str, tuple[str, ...]] = {
    "": (PolicyError.__name__,),
    "mega_agentrl": (PolicyError.__name__,),
    "agents": (
        "MaxTurnsExceeded",
        "ModelBehaviorError",
        "ModelRefusalError",
        "OutputGuardrailTripwireTriggered",
        "ToolInputGuardrailTripwireTriggered",
    ),
    "dspy": ("AdapterParseError",),
    "google": ("LlmCallsLimitExceededError",),
    "langchain": (
        "ModelCallLimitExceededError",
        "StructuredOutputError",
        "ToolCallLimitExceededError",
    ),
    "langchain_core": ("OutputParserException",),
    "langgraph": ("GraphRecursionError",),
    "minisweagent": ("FormatError", "LimitsExceeded"),
    "pydantic_ai": ("AgentRunError", "UnexpectedModelBehavior", "UsageLimitExceeded"),
    "smolagents": (
        "AgentExecutionError",
        "AgentMaxStepsError",
        "AgentParsingError",
        "AgentToolCallError",
    ),
    "strands": ("MaxTokensReachedException", "StructuredOutputException"),
}
"""Classes by package; their subclasses count, too."""

_OTHER_ERRORS: dict[str, tuple[str, ...]] = {
    "pydantic_ai": ("ConcurrencyLimitExceeded", "ModelAPIError", "ModelHTTPError"),
    "smolagents": ("AgentToolExecutionError",),
}
"""Subclasses of known classes that the policy does not cause."""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXPECTED = (
    "names of exception classes, such as `json.JSONDecodeError`, or `FILE.py:NAME` for your own"
)

ClassKey = tuple[str, str]
"""Package and name of a class; the package is empty for Python's own and those of a program."""


class PolicyErrors:
    """The exceptions of a run's agent that the policy causes.

    Args:
        more: `rollout.agent.policy_errors`.

    Raises:
        ConfigError: an entry names no class of exceptions.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._by_policy: dict[ClassKey, bool] = {}
        for table, by_policy in ((KNOWN_POLICY_ERRORS, True), (_OTHER_ERRORS, False)):
            for package, names in table.items():
                self._by_policy |= dict.fromkeys([(package, name) for name in names], by_policy)
        self._by_policy |= {_parse_entry(entry): True for entry in more}

    def contains(self, error: BaseException) -> bool:
        """Return whether the policy causes this error; of a group, all of its errors."""
        if isinstance(error, BaseExceptionGroup):
            return all(self.contains(item) for item in error.exceptions)
        if isinstance(error, AgentCommandError):
            keys = [_class_key(error.class_name)] if error.class_name else []
        else:
            keys = [_class_key(class_name(kind)) for kind in type(error).__mro__]
        # The most derived class that is known decides.
        return next((self._by_policy[key] for key in keys if key in self._by_policy), False)


def class_name(kind: type[BaseException]) -> str:
    """Return module and name of a class, as Python's tracebacks show them."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_key(name: str) -> ClassKey:
    package, dot, _ = name.partition(".")
    return (package if dot else "", name.rpartition(".")[2])


def _parse_entry(entry: str) -> ClassKey:
    """Return the class that an entry of the setting names.

    Raises:
        ConfigError: it is no name, or its module has been imported and has no such exception.
    """
    if is_user_code(entry):
        loaded = load_user_object(entry, KEY, _EXPECTED)
        is_exception = isinstance(loaded, type) and issubclass(loaded, BaseException)
        check_range(is_exception, KEY, entry, _EXPECTED)
        return _class_key(class_name(loaded))
    check_range(_NAME.fullmatch(entry) is not None, KEY, entry, _EXPECTED)
    module, _, name = entry.rpartition(".")
    owner = sys.modules.get(module) if module else builtins
    found = getattr(owner, name, None)
    is_exception = isinstance(found, type) and issubclass(found, BaseException)
    # A program that runs as a command may define a class without a dot, or import another package.
    if owner is not None and not is_exception and (module or found is not None):
        raise ConfigError(KEY, entry, _EXPECTED, f"{module or 'Python'} has no such exception")
    return _class_key(entry)
