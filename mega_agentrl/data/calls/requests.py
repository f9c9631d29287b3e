"""Requests of the function-calling task, each with its catalogue and the expected calls.

* `one`: a call of one function: `Call "Bako" with 47 and "Tirok".`
* `parallel`: two calls, of one function or of two: `Call "Bako" with 47 and "Dumi" with no.`
* `none`: a function that the catalogue lacks; no call is right.

A catalogue has `CATALOGUE_SIZE` functions in random order: those that are called, and distractors,
the first of which shares a syllable with a requested function. The values of a call are in random
order, told apart by their types; truth values are `yes` and `no`. All functions and numbers are of
the split of the request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mega_agentrl.data.calls.functions import Call, Function, Value, make_call
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
    functions: Sequence[Function],
    *,
    num_requests: int,
    seed: int,
) -> list[Request]:
    """Return `num_requests` requests with different texts, about equally many of each kind.

    Raises:
        ValueError: the split has too few functions and values.
    """
    rng = random.Random(f"calls requests {split} {seed}")
    requests: dict[str, Request] = {}
    kinds = list(RequestKind)
    for _ in range(20 * num_requests):
        if len(requests) == num_requests:
            break
        request = _make_request(kinds[len(requests) % len(kinds)], functions, rng)
        requests.setdefault(request.text, request)
    if len(requests) < num_requests:
        raise ValueError(
            f"{split} requests: num_requests={num_requests}: found {len(requests)} different ones, "
            "expected fewer to be asked for: the split has no more functions and values"
        )
    shuffled = list(requests.values())
    rng.shuffle(shuffled)
    return shuffled


def _make_request(kind: RequestKind, functions: Sequence[Function], rng: random.Random) -> Request:
    num_calls = NUM_PARALLEL_CALLS if kind is RequestKind.parallel else 1
    requested = _sample_functions(num_calls, [functions], rng)
    calls = tuple(make_call(function, rng) for function in requested)
    similar = [one for one in functions if one.last_syllable == requested[0].last_syllable]
    offered = () if kind is RequestKind.none else requested
    others = _sample_functions(
        CATALOGUE_SIZE - len(offered), [similar, functions], rng, except_like=requested
    )
    return Request(
        kind=kind,
        text=f"Call {', then '.join(_describe(call, rng) for call in calls)}.",
        catalogue=tuple(rng.sample([*offered, *others], CATALOGUE_SIZE)),
        requested=requested,
        calls=calls if offered else (),
    )


def _sample_functions(
    count: int,
    pools: Sequence[Sequence[Function]],
    rng: random.Random,
    *,
    except_like: Sequence[Function] = (),
) -> tuple[Function, ...]:
    """Return functions with different first syllables, which differ from those of `except_like`.

    The first function is of the first pool, the second of the second pool, and so on; the last pool
    serves all others. A pool without a suitable function is skipped.
    """
    chosen: list[Function] = []
    syllables = {function.first_syllable for function in except_like}
    for pool in [*pools, *[pools[-1]] * count]:
        candidates = [one for one in pool if one.first_syllable not in syllables]
        if candidates and len(chosen) < count:
            chosen.append(rng.choice(candidates))
            syllables.add(chosen[-1].first_syllable)
    return tuple(chosen)


def _describe(call: Call, rng: random.Random) -> str:
    values = rng.sample(call.values, len(call.values))
    return f'"{call.function.name}" with {" and ".join(map(format_value, values))}'


def format_value(value: Value) -> str:
    """Return a value as requests write it; the quotes give a name the same tokens as in JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f'"{value}"'
