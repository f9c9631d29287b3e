"""Compare a function of this package with one of a peer over many inputs.

An input on which the two differ must be explained by a `Reason`, else the comparison fails. So does
a reason that explains nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_EXAMPLES = 3
"""Number of unexplained inputs that are shown for a comparison."""
MAX_TEXT = 300
"""Number of characters of a value that are shown."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the two differ on some inputs."""

    text: str
    """One clause for the table."""
    applies: Callable[[Any], bool]
    """Whether it explains the difference on an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two functions and the inputs on which they should agree."""

    function: str
    """The peer's function, and what it is called here."""
    inputs: Iterable[Any]
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    reasons: tuple[Reason, ...] = ()
    tolerance: float = 1e-5
    """Largest absolute or relative difference of two numbers."""


@dataclass(slots=True)
class Outcome:
    """A row of the table."""

    function: str
    num_inputs: int = 0
    num_agreed_refusals: int = 0
    """Inputs that both refuse with an exception."""
    explained: dict[str, int] = field(default_factory=dict)
    """Number of inputs that each reason explains."""
    unexplained: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What is wrong with the comparison, as lines."""
        lines = [f"{self.unexplained} differences without a reason"] if self.unexplained else []
        lines += [
            f"no input differs by the reason: {text}"
            for text, count in self.explained.items()
            if not count
        ]
        if self.num_inputs == self.num_agreed_refusals:
            lines.append("no input was accepted")
        return lines + self.examples


@dataclass(frozen=True, slots=True)
class Refusal:
    """An exception in place of a result; all of them are equal."""

    error: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal)

    def __hash__(self) -> int:
        return 0


def compare(comparison: Comparison) -> Outcome:
    """Call both functions with every input."""
    outcome = Outcome(comparison.function)
    outcome.explained = {reason.text: 0 for reason in comparison.reasons}
    for value in comparison.inputs:
        outcome.num_inputs += 1
        ours, theirs = _call(comparison.ours, value), _call(comparison.theirs, value)
        if is_equal(ours, theirs, comparison.tolerance):
            outcome.num_agreed_refusals += isinstance(ours, Refusal)
            continue
        reasons = [reason.text for reason in comparison.reasons if reason.applies(value)]
        if reasons:
            outcome.explained[reasons[0]] += 1
            continue
        outcome.unexplained += 1
        if len(outcome.examples) < MAX_EXAMPLES:
            parts = (f"input {value!r}", f"ours {ours!r}", f"theirs {theirs!r}")
            outcome.examples.append("; ".join(part[:MAX_TEXT] for part in parts))
    return outcome


def is_equal(left: Any, right: Any, tolerance: float) -> bool:
    """Return whether two results agree; NaN is equal to NaN."""
    if isinstance(left, Refusal) or isinstance(right, Refusal):
        return left == right
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape:
            return False
        left, right = left.detach().double(), right.detach().double()
        return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(
            is_equal(value, right[key], tolerance) for key, value in left.items()
        )
    if _is_list(left) and _is_list(right):
        return len(left) == len(right) and all(
            is_equal(*pair, tolerance) for pair in zip(left, right, strict=True)
        )
    if isinstance(left, float) or isinstance(right, float):
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        return numbers and (
            math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
            or (math.isnan(left) and math.isnan(right))
        )
    return bool(left == right)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _call(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except Exception as error:  # noqa: BLE001  whatever it raises is its result
        return Refusal(f"{type(error).__name__}: {error}")
