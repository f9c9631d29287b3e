"""Requests of the function-calling task, each with its catalogue and the expected calls.

* `one`: a call of one function: `Call "Bako" with 7.`
* `parallel`: calls of two functions: `Call "Bako" with "warm", then "Dumi" with no.`
* `none`: a function that the catalogue lacks; no call is right.

A catalogue has `CATALOGUE_SIZE` functions in random order: those that are called, and distractors,
the first of which ends like a requested function. The names in a request and its catalogue begin
differently, so that a tiny model finds a function by its first token. Truth values are `yes` and
`no`. All functions are of the split of the request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mega_agentrl.data.calls.functions import (
    Call,
    Function,
    Value,
    first_syllable,
    last_syllable,
    make_call,
    make_function,
)
from mega_agentrl.data.generated.entity_splits import Split

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
    """The calls that are right, in any order."""

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
        raise ValueError(
            f"{split} requests: num_requests={num_requests}: found {len(requests)} different ones, "
            "expected fewer to be asked for: the split has no more functions and values"
        )
    shuffled = list(requests.values())
    rng.shuffle(shuffled)
    return shuffled


def _make_request(kind: RequestKind, names: Sequence[str], rng: random.Random) -> Request:
    num_calls = NUM_PARALLEL_CALLS if kind is RequestKind.parallel else 1
    num_offered = 0 if kind is RequestKind.none else num_calls
    requested_names = _sample_names([names] * num_calls, rng)
    similar = [
        name
        for name in names
        if last_syllable(name) == last_syllable(requested_names[0])
        and first_syllable(name) not in map(first_syllable, requested_names)
    ]
    pools = [similar or names, *[names] * CATALOGUE_SIZE][: CATALOGUE_SIZE - num_offered]
    distractors = [
        make_function(name, rng) for name in _sample_names(pools, rng, unlike=requested_names)
    ]
    requested = tuple(make_function(name, rng) for name in requested_names)
    calls = tuple(make_call(function, rng) for function in requested)
    return Request(
        kind=kind,
        text=f"Call {', then '.join(map(_describe, calls))}.",
        catalogue=tuple(rng.sample([*requested[:num_offered], *distractors], CATALOGUE_SIZE)),
        requested=requested,
        calls=calls[:num_offered],
    )


def _sample_names(
    pools: Sequence[Sequence[str]], rng: random.Random, *, unlike: Sequence[str] = ()
) -> list[str]:
    """Return a name of each pool; they and those of `unlike` have different first syllables."""
    names: list[str] = []
    for pool in pools:
        used = {first_syllable(name) for name in (*names, *unlike)}
        names.append(rng.choice([name for name in pool if first_syllable(name) not in used]))
    return names


def _describe(call: Call) -> str:
    return f'"{call.function.name}" with {format_value(call.value)}'


def format_value(value: Value) -> str:
    """Return a value as requests write it; the quotes give a text the same token as in JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f'"{value}"'
