"""Expected calls that accept several values of an argument, in the form of `types.ground_truth`.

Whether an answer is accepted is checked argument by argument, so that a question may accept any
number of answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.reward.call_parser import (
    CallParseError,
    FunctionCall,
    NormalizedValue,
    normalize_value,
    parse_calls,
)

_ACCEPTED, _OPTIONAL = "accepted", "optional"

Equal = Callable[[NormalizedValue, NormalizedValue], bool]
"""Returns whether a value, the second, is an accepted one, the first; neither has others in it."""


@dataclass(frozen=True, slots=True)
class AcceptedMembers:
    """Accepted values of the arguments of a call, or of the members of an object."""

    accepted: Mapping[str, tuple[Any, ...]]
    """Accepted values by name: normalised values, `AcceptedMembers`, or lists of these."""
    optional: frozenset[str]
    """Names that may be left out."""

    def accepts(self, members: Sequence[tuple[str, NormalizedValue]], equal: Equal) -> bool:
        """Return whether these are the right names and values."""
        given = dict(members)
        return (
            len(given) == len(members)
            and given.keys() <= self.accepted.keys()
            and all(name in given or name in self.optional for name in self.accepted)
            and all(
                any(_accepts(choice, value, equal) for choice in self.accepted[name])
                for name, value in given.items()
            )
        )


@dataclass(frozen=True, slots=True)
class AcceptedCall:
    """An expected call."""

    name: str
    arguments: AcceptedMembers

    def accepts(self, call: FunctionCall, equal: Equal) -> bool:
        """Return whether a call is right."""
        return call.name == self.name and self.arguments.accepts(call.arguments, equal)


def parse_expected_calls(truth: str) -> list[AcceptedCall]:
    """Return the calls of a ground truth, in any form that `parse_calls` or `accepted` has.

    Raises:
        CallParseError: they cannot be parsed.
    """
    try:
        values = parse_json(truth)
    except ValueError:
        values = None
    if not isinstance(values, list):
        return [_literal_call(call) for call in parse_calls(truth)]
    expected: list[AcceptedCall] = []
    for value in values:
        if isinstance(value, dict) and isinstance(value.get(_ACCEPTED), dict):
            name = value.get("name")
            if not isinstance(name, str) or not name:
                raise CallParseError("got a call without a name, expected a name as text")
            expected.append(AcceptedCall(name, _parse_members(value)))
        else:
            expected += [_literal_call(call) for call in parse_calls(json.dumps([value]))]
    return expected


def calls_match(
    calls: Sequence[FunctionCall],
    expected: Sequence[AcceptedCall],
    *,
    ordered: bool,
    equal: Equal,
) -> bool:
    """Return whether there is an expected call for each call, in order or in any.

    Args:
        calls: the calls of an answer.
        expected: the calls of a ground truth.
        ordered: whether they must come in the expected order.
        equal: compares numbers, booleans and texts.
    """
    if len(calls) != len(expected):
        return False
    accepted = [
        [index for index, one in enumerate(expected) if one.accepts(call, equal)] for call in calls
    ]
    if ordered:
        return all(index in indices for index, indices in enumerate(accepted))
    return _num_matched(accepted) == len(calls)


def _num_matched(choices: Sequence[Sequence[int]]) -> int:
    """Return how many rows can get a choice of their own, by augmenting paths."""
    row_by_choice: dict[int, int] = {}

    def assign(row: int, tried: set[int]) -> bool:
        for choice in choices[row]:
            if choice not in tried:
                tried.add(choice)
                if choice not in row_by_choice or assign(row_by_choice[choice], tried):
                    row_by_choice[choice] = row
                    return True
        return False

    return sum(assign(row, set()) for row in range(len(choices)))


def _literal_call(call: FunctionCall) -> AcceptedCall:
    accepted = {name: (value,) for name, value in call.arguments}
    return AcceptedCall(call.name, AcceptedMembers(accepted, frozenset()))


def _parse_members(value: Mapping[str, Any]) -> AcceptedMembers:
    options, optional = value[_ACCEPTED], value.get(_OPTIONAL, [])
    if not all(isinstance(values, list) and values for values in options.values()) or not (
        isinstance(optional, list) and all(name in options for name in optional)
    ):
        raise CallParseError(
            'got accepted values of another form, expected {"accepted": {name: [values]}, '
            '"optional": [names]}'
        )
    return AcceptedMembers(
        {name: tuple(map(_parse_choice, values)) for name, values in options.items()},
        frozenset(optional),
    )


def _parse_choice(value: Any) -> Any:
    """Return an accepted value: normalised, or with `AcceptedMembers` in it or in place of it."""
    if isinstance(value, dict) and value.keys() == {_ACCEPTED, _OPTIONAL}:
        return _parse_members(value)
    if isinstance(value, list):
        return ("list", *map(_parse_choice, value))
    return normalize_value(value)


def _accepts(choice: Any, value: NormalizedValue, equal: Equal) -> bool:
    if isinstance(choice, AcceptedMembers):
        return value[0] == "map" and choice.accepts(value[1:], equal)
    if choice[0] == "list" and value[0] == "list":
        return len(choice) == len(value) and all(
            _accepts(item, other, equal) for item, other in zip(choice[1:], value[1:], strict=True)
        )
    if choice[0] == value[0] == "map":
        names, other_names = ([name for name, _ in pair[1:]] for pair in (choice, value))
        return names == other_names and all(
            _accepts(item, other, equal)
            for (_, item), (_, other) in zip(choice[1:], value[1:], strict=True)
        )
    if choice[0] == value[0] == "call":
        return _literal_call(choice[1]).accepts(value[1], equal)
    return equal(choice, value)
