"""Recognises how a user's reward function wants to be called, and calls it.

    verl's and ours   called with those of `data_source`, `solution_str`, `ground_truth`,
                      `extra_info`, `messages`, `num_turns`, `stop_reason`, `tool_rewards` that it
                      names; returns a result
    batched (verl)    `data_sources`, `solution_strs`, `ground_truths`, `extra_infos`; returns a
                      list of results
    EasyR1's          `reward_inputs`, a list of objects with `response`, `response_length` and
                      `ground_truth`, or one object as `reward_input`; returns a list, or a result
    TRL's             `prompts`, `completions` and the columns that it names; returns a list

Functions that take lists get lists of one row. Any of them may be asynchronous, a class with
`__call__`, an instance of one, or a `functools.partial`. All other parameters need defaults.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mega_agentrl.config.sections.reward import FUNCTION_ARGUMENTS, OPTIONAL_FUNCTION_ARGUMENTS
from mega_agentrl.errors import InputError

_BATCHED = {f"{name}s": name for name in FUNCTION_ARGUMENTS}
_EASY_R1 = ("reward_inputs", "reward_input")
_OF_OTHERS = {
    "queries": "OpenRLHF's reward functions",
    "labels": "OpenRLHF's reward functions",
    "sample": "slime's reward functions",
    "data": "verl's reward managers",
}
WRAP = (
    "wrap it: def compute_score(data_source, solution_str, ground_truth, extra_info): "
    "return yours(...)"
)


class CallFormError(ValueError):
    """A function cannot be called in any of the forms; the message says why and what to wrap.

    Attributes:
        missing: Names of the arguments that the function needs and a row does not have.
    """

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


@dataclass(frozen=True, slots=True)
class UserCall:
    """A user's function and the form in which it is called."""

    function: Callable[..., Any]
    make_arguments: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Maps the values of a row to keyword arguments."""
    is_batched: bool = False
    """Whether the function returns a list with one result."""

    def run(self, values: Mapping[str, Any]) -> Any:
        """Return the function's result for one row.

        Raises:
            ValueError: a batched function did not return one result. Its own errors pass through.
        """
        result = self.function(**self.make_arguments(values))
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(_wait(result))
        return _only_item(result) if self.is_batched else result


def make_call(function: object) -> UserCall:
    """Return how a function is called.

    Raises:
        CallFormError: it cannot be called.
    """
    if inspect.isclass(function):
        function = _make_instance(function)
    if not callable(function):
        raise CallFormError(f"got {function!r}, expected a function")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a compiled function may have no signature that can be read
        return UserCall(function, _row_arguments(frozenset(), takes_rest=True))
    names = frozenset(
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes_rest = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    if "completions" in names:
        return UserCall(function, _trl_arguments(names, required), is_batched=True)
    if not takes_rest or names.intersection((*_BATCHED, *_EASY_R1)):
        easy_name = next((name for name in _EASY_R1 if name in names), "")
        if easy_name:
            _check_required(function, required, (easy_name,))
            is_batched = easy_name == _EASY_R1[0]
            return UserCall(function, _easy_r1_arguments(easy_name), is_batched=is_batched)
        if "solution_strs" in names:
            _check_required(function, required, tuple(_BATCHED))
            return UserCall(function, _batched_arguments(names, takes_rest), is_batched=True)
    _check_required(function, required, (*FUNCTION_ARGUMENTS, *OPTIONAL_FUNCTION_ARGUMENTS))
    if not takes_rest and not names.intersection(("solution_str", "messages")):
        raise CallFormError(
            f"its arguments are {inspect.signature(function)}, without solution_str, so that it "
            f"would not see the answer; {WRAP}"
        )
    return UserCall(function, _row_arguments(names, takes_rest=takes_rest))


def _make_instance(kind: type) -> Any:
    try:
        instance = kind()
    except TypeError as error:
        raise CallFormError(
            f"the class {kind.__name__} needs arguments ({error}); name an instance of it"
        ) from error
    if not callable(instance):
        raise CallFormError(f"the class {kind.__name__} has no __call__")
    return instance


def _check_required(
    function: Callable[..., Any], required: list[str], offered: tuple[str, ...]
) -> None:
    missing = [name for name in required if name not in offered]
    if missing:
        known = dict.fromkeys(_OF_OTHERS[name] for name in missing if name in _OF_OTHERS)
        likeness = f", as {' or '.join(known)} do" if known else ""
        raise CallFormError(
            f"its arguments are {inspect.signature(function)}: it needs {', '.join(missing)}"
            f"{likeness}, which a row does not have; give {missing[0]} a default, or {WRAP}",
            missing,
        )


def _row_arguments(
    names: frozenset[str], *, takes_rest: bool
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    wanted = [name for name in FUNCTION_ARGUMENTS if takes_rest or name in names]
    wanted += [name for name in OPTIONAL_FUNCTION_ARGUMENTS if name in names]
    return lambda values: {name: values.get(name) for name in wanted}


def _batched_arguments(
    names: frozenset[str], takes_rest: bool
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    wanted = {plural: name for plural, name in _BATCHED.items() if takes_rest or plural in names}
    return lambda values: {plural: [values.get(name)] for plural, name in wanted.items()}


def _easy_r1_arguments(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def make(values: Mapping[str, Any]) -> dict[str, Any]:
        row = {
            "response": values["solution_str"],
            "response_length": values.get("response_length"),
            "ground_truth": values["ground_truth"],
            "data_source": values.get("data_source"),
        }
        return {name: [row] if name == _EASY_R1[0] else row}

    return make


def _trl_arguments(
    names: frozenset[str], required: list[str]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the arguments of TRL's functions: conversations, and columns as lists of one row."""

    def make(values: Mapping[str, Any]) -> dict[str, Any]:
        messages = list(values.get("messages") or [])
        start = next(
            (i for i, message in enumerate(messages) if message["role"] == "assistant"),
            len(messages),
        )
        completion = messages[start:] or [{"role": "assistant", "content": values["solution_str"]}]
        columns = dict(values.get("extra_info") or {})
        columns |= {name: values.get(name) for name in ("data_source", "ground_truth")}
        columns |= {"prompts": messages[:start], "completions": completion}
        missing = [name for name in required if name not in columns]
        if missing:
            present = ", ".join(sorted(columns))
            message = f"it needs {', '.join(missing)}, but a row has {present}; {WRAP}"
            raise CallFormError(message, missing)
        return {name: [value] for name, value in columns.items() if name in names}

    return make


def _only_item(result: Any) -> Any:
    items = list(result.tolist() if hasattr(result, "tolist") else result)
    if len(items) != 1:
        raise InputError("results for one row", len(items), "a list of one")
    return items[0]


async def _wait(result: Any) -> Any:
    return await result


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which all calls share as they may share a client."""
    return asyncio.new_event_loop()
