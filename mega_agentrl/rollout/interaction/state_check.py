"""A user of API classes who poses one turn after another, and judges by state and results.

It scores conversations as BFCL's multi-turn checker does, with the tools of `tool.api_classes` and
`rollout.call_protocol=hermes`::

    - class_name: mega_agentrl.rollout.interaction.state_check.StateCheckUser
      config: {classes: [examples/my_api.py:TodoList]}    # as in tool.user_tools_file

The prompt holds the first turn. Its `interaction_kwargs` are those of a scenario (`api_classes`)
and

    turns                 texts of the user's further messages
    ground_truth          for each turn, the first included, Python calls such as `add(name='x')`
    excluded_functions    methods that the prompt's tools lack

A message without a call ends a turn. Then the calls of the turn run on instances of the user's own,
and those of the ground truth on a second set of instances, which go on from turn to turn. The turn
passes if

* all public attributes of the instances are equal,
* every result of the ground truth's calls is among the results of the policy's calls so far, each
  as often,
* and the policy made a call, if the ground truth has one.

A turn without a call in the ground truth is not checked, so that calls there matter only by the
state that they leave. The final reward is 1 if all turns passed, else 0. The classes must be
deterministic: tools and checks run every call once each. Calls of the policy that take longer than
half of `timeout_s` here do not pass either: they are its own choice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.converters.function_calls import read_python_call
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.conversation.tool_calls import NOT_RUN
from mega_agentrl.rollout.interaction.base import Interaction, Reply
from mega_agentrl.tool.api_classes import SCENARIO_KEYS, ApiClasses, ApiState
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.call_protocol.hermes import HermesProtocol
from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline
from mega_agentrl.tool.function import run_in_thread
from mega_agentrl.tool.interface_check import validated_schema
from mega_agentrl.types.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.types.records import Message

_TRUTH_KEY = "interaction_kwargs.ground_truth"
_PythonCall = tuple[str, list[Any], dict[str, Any]]


@dataclass(slots=True)
class _CheckState:
    turns: Sequence[str]
    truth: Sequence[Sequence[_PythonCall]]
    """Name, positional and named arguments of the expected calls of each turn."""
    excluded: frozenset[str]
    actual: ApiState
    """Instances on which the policy's calls ran."""
    expected: ApiState
    """Instances on which the expected calls ran."""
    results: list[str] = field(default_factory=list)
    """Results of the policy's calls in all turns."""
    num_turns: int = 0
    """Number of turns that have ended."""
    failure: str = ""
    """Why the first wrong turn did not pass; empty if there is none."""


class StateCheckUser(Interaction):
    """Poses the turns of a conversation and compares states and results after each.

    Args:
        classes: the API classes, as those of `tool.api_classes.ApiClasses`.
        check_types: as there.
        stops_at_failure: whether the conversation ends at the first turn that does not pass, since
            its reward is 0 then.
    """

    name = "state_check"
    max_turns = 64

    def __init__(
        self, classes: Sequence[str], check_types: bool = True, stops_at_failure: bool = True
    ) -> None:
        self._api = ApiClasses(classes, check_types)
        self._stops_at_failure = stops_at_failure
        tools = self._api.tools()
        self._schemas = {tool.name: validated_schema(tool, f"tool {tool.name}") for tool in tools}
        self._protocol = HermesProtocol(self._schemas)

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a malformed scenario, and for calls of unknown functions."""
        known = (*SCENARIO_KEYS, "turns", "ground_truth", "excluded_functions")
        if unknown := sorted(set(kwargs) - set(known)):
            raise InputError("interaction_kwargs", unknown, f"keys among {known}")
        turns, truth = kwargs.get("turns") or [], kwargs.get("ground_truth")
        if not isinstance(truth, list) or len(truth) != len(turns) + 1:
            expected = f"a list of calls for each of {len(turns) + 1} turns"
            raise InputError(_TRUTH_KEY, truth, expected)
        for name, values, named in (call for calls in _parse_truth(truth) for call in calls):
            tool = self._api.tool(name.rpartition(".")[2])
            if tool is None:
                expected = "calls of methods of the classes"
                raise InputError(_TRUTH_KEY, name, expected, "a class is missing in config.classes")
            properties = (tool.parameters or {}).get("properties", {})
            if len(values) > len(properties) or not set(named) <= set(properties):
                expected = f"some of the parameters {sorted(properties)}"
                raise InputError(f"{_TRUTH_KEY}, call of {name}", (values, named), expected)
        self._api.check_scenario(_scenario(kwargs))

    async def create(self, kwargs: Mapping[str, Any]) -> _CheckState:
        """Create both sets of instances."""
        make = partial(self._api.create_state, _scenario(kwargs))
        return _CheckState(
            turns=kwargs.get("turns") or [],
            truth=_parse_truth(kwargs["ground_truth"]),
            excluded=frozenset(kwargs.get("excluded_functions") or ()),
            actual=await run_in_thread(make),
            expected=await run_in_thread(make),
        )

    async def respond(self, state: _CheckState, messages: Sequence[Message]) -> Reply:
        """Check the turn that ends here, and pose the next one."""
        run = partial(self._run_calls, state, list(messages))
        limit_s = self.timeout_s / 2
        try:
            num_calls = await run_with_deadline(run_in_thread(run), limit_s)
        except DeadlineExceededError:
            # A thread still changes the state, so that nothing can follow.
            state.failure = state.failure or f"the policy's calls took longer than {limit_s:g} s"
            return Reply(is_last=True)
        failure = await run_in_thread(partial(self._check_turn, state, num_calls))
        state.num_turns += 1
        state.failure = state.failure or failure
        if state.num_turns == len(state.truth) or (state.failure and self._stops_at_failure):
            return Reply(is_last=True)
        return Reply(text=state.turns[state.num_turns - 1])

    async def fork(self, state: _CheckState) -> _CheckState:
        """Return a deep copy of both sets of instances and of the results."""
        return await run_in_thread(partial(copy.deepcopy, state))  # type: ignore[no-any-return]

    async def calc_reward(self, state: _CheckState) -> float:
        """Return 1 if the conversation reached its end and every turn passed, else 0."""
        return float(state.num_turns == len(state.truth) and not state.failure)

    def _run_calls(self, state: _CheckState, messages: Sequence[Message]) -> int:
        """Run the calls of the policy, and return how many it made."""
        num_calls = 0
        for call, is_refused in self._iter_calls(messages):
            num_calls += 1
            if not is_refused and call.tool not in state.excluded:
                state.results += self._run(state.actual, call)
        return num_calls

    def _check_turn(self, state: _CheckState, num_calls: int) -> str:
        """Run the calls of the truth; return why the turn does not pass, empty if it does."""
        truth = state.truth[state.num_turns]
        wanted = [state.expected.call(*call)[0] for call in truth]
        if not truth:
            return ""
        if not num_calls:
            return "no call"
        try:
            difference = compare_states(state.actual, state.expected)
        except RecursionError:  # the policy has nested its arguments deeply
            return "the state is nested too deeply to be compared"
        return difference or missing_results(state.results, wanted)

    def _iter_calls(self, messages: Sequence[Message]) -> list[tuple[ToolCall, bool]]:
        """Return the readable calls since the user's last message, and which were not run."""
        start = max(place for place, one in enumerate(messages) if one["role"] == "user") + 1
        calls: list[tuple[ToolCall, bool]] = []
        for place in range(start, len(messages)):
            if messages[place]["role"] != "assistant":
                continue
            found = self._protocol.parse_calls(str(messages[place]["content"]))
            for call, answer in zip(found, messages[place + 1 :], strict=False):
                if isinstance(call, ToolCall):
                    calls.append((call, str(answer["content"]).startswith(NOT_RUN)))
        return calls

    def _run(self, instances: ApiState, call: ToolCall) -> list[str]:
        """Return the result of a call, none if the tools refused it."""
        schema = self._schemas.get(call.tool)
        if schema is None:
            return []
        try:
            arguments = schema.validate_arguments(call.arguments)
        except ToolInputError:
            return []
        return [instances.call(call.tool, (), arguments)[0]]


def compare_states(actual: ApiState, expected: ApiState) -> str:
    """Return the first public attribute that differs, as `Class.attribute`; empty if none does."""
    found = actual.attributes()
    for name, attributes in expected.attributes().items():
        for key, value in attributes.items():
            if key not in found[name] or found[name][key] != value:
                return f"state of {name}.{key}"
    return ""


def missing_results(results: Sequence[str], wanted: Sequence[str]) -> str:
    """Return the first wanted result that the results lack, or have less often; else empty."""
    left = list(results)
    for one in wanted:
        if one not in left:
            return f"result {one[:200]!r} is missing"
        left.remove(one)
    return ""


def _scenario(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in SCENARIO_KEYS if key in kwargs}


def _parse_truth(truth: Sequence[Sequence[str]]) -> list[list[_PythonCall]]:
    return [[read_python_call(call) for call in calls or ()] for calls in truth]
