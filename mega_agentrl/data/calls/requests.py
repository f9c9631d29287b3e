"""Requests of the function-calling task, each with its catalogue and the expected calls.

* `one`: a call of one function, written `Bako with 7` on a line below `Call:`.
* `parallel`: calls of two functions, one a line: `Bako with "warm"` and `Dumi with no`.
* `none`: a function that the catalogue lacks; no call is right.

A catalogue has `CATALOGUE_SIZE` functions in random order: requested ones, and distractors.
The names in a request and its catalogue share no syllable, so that each token of a name says which
function it is. Truth values are `yes` and `no`. All functions belong to the split of the request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mega_agentrl.data.calls.functions import (
    SYLLABLE_CHARS,
    Call,
    Function,
    Value,
    make_call,
    make_function,
)
from mega_agentrl.data.generated.entity_splits import Split
from mega_agentrl.errors import InputError

CATALOGUE_SIZE = 3
NUM_PARALLEL_CALLS = 2


class RequestKind(StrEnum):
    """Number of calls that a request needs."""

    one = "one"
    parallel = "parallel"
    none = "none"


@dataclass(frozen=True, slots=True)
class Request:
    """A request with the functions on offer and the expected calls."""

    kind: RequestKind
    text: str
    catalogue: tuple[Function, ...]
    """The functions on offer."""
    requested: tuple[Function, ...]
    """The functions that the text names, offered or not."""
    calls: tuple[Call, ...]
    """The expected calls, in any order."""

    @property
    def data_source(self) -> str:
        """The data source, by which results are grouped."""
        return f"calls_{self.kind}"

    @property
    def ground_truth(self) -> str:
        """The expected calls as the reward reads them."""
        return json.dumps([call.as_dict for call in self.calls])


def make_requests(
    split: Split,
    names: Sequence[str],
    *,
    num_requests: int,
    seed: int,
) -> list[Request]:
    """Return `num_requests` requests with different texts, about equally many of each kind.

    Args:
        split: the split, on which the random choices depend.
        names: names of the functions of the split.
        num_requests: number of requests.
        seed: seed of all splits.

    Raises:
        ValueError: the split has too few functions and values.
    """
    rng = random.Random(f"calls requests {split} {seed}")
    requests: dict[str, Request] = {}
    kinds = list(RequestKind)
    for _ in range(20 * num_requests):
        if len(requests) == num_requests:
            break
        request = _make_request(kinds[len(requests) % len(kinds)], names, rng)
        requests.setdefault(request.text, request)
    if len(requests) < num_requests:
        raise InputError(
            f"{split} requests, num_requests",
            num_requests,
            f"at most the {len(requests)} different ones that were found",
            "the split has too few functions and values",
        )
    shuffled = list(requests.values())
    rng.shuffle(shuffled)
    return shuffled


def _make_request(kind: RequestKind, names: Sequence[str], rng: random.Random) -> Request:
    num_calls = NUM_PARALLEL_CALLS if kind is RequestKind.parallel else 1
    num_offered = 0 if kind is RequestKind.none else num_calls
    num_functions = CATALOGUE_SIZE - num_offered + num_calls
    functions = [make_function(name, rng) for name in _sample_names(num_functions, names, rng)]
    requested = tuple(functions[:num_calls])
    calls = tuple(make_call(function, rng) for function in requested)
    return Request(
        kind=kind,
        text="\n".join(["Call:", *map(_describe, calls)]),
        catalogue=tuple(rng.sample(functions[num_calls - num_offered :], CATALOGUE_SIZE)),
        requested=requested,
        calls=calls[:num_offered],
    )


def _sample_names(count: int, names: Sequence[str], rng: random.Random) -> list[str]:
    """Return names of which no two share their first or their last syllable."""
    chosen: list[str] = []
    for name in rng.sample(names, len(names)):
        if len(chosen) < count and not any(_share_syllable(name, other) for other in chosen):
            chosen.append(name)
    return chosen


def _share_syllable(name: str, other: str) -> bool:
    size = SYLLABLE_CHARS
    return name[:size] == other[:size] or name[size:] == other[size:]


def _describe(call: Call) -> str:
    return f"{call.function.name} with {format_value(call.value)}"


def format_value(value: Value) -> str:
    """Return a value as requests write it; the quotes give a text the same token as in JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f'"{value}"'
