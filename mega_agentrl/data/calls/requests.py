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
SYLLABLE_CHARS = 2


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
    numbers: Sequence[int],
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
        request = _make_request(kinds[len(requests) % len(kinds)], functions, numbers, rng)
        requests.setdefault(request.text, request)
    if len(requests) < num_requests:
        raise ValueError(
            f"{split} requests: num_requests={num_requests}: found {len(requests)} different ones, "
            "expected fewer to be asked for: the split has no more functions and values"
        )
    shuffled = list(requests.values())
    rng.shuffle(shuffled)
    return shuffled


def _make_request(
    kind: RequestKind, functions: Sequence[Function], numbers: Sequence[int], rng: random.Random
) -> Request:
    calls = [make_call(rng.choice(functions), numbers, rng)]
    while kind is RequestKind.parallel and len(calls) < NUM_PARALLEL_CALLS:
        function = rng.choice([calls[0].function, rng.choice(functions)])
        call = make_call(function, numbers, rng)
        if call not in calls:
            calls.append(call)
    text = f"Call {' and '.join(_describe(call, rng) for call in calls)}."
    requested = list(dict.fromkeys(call.function for call in calls))
    offered = [] if kind is RequestKind.none else requested
    catalogue = _add_distractors(offered, requested, functions, rng)
    return Request(kind, text, catalogue, () if kind is RequestKind.none else tuple(calls))


def _add_distractors(
    offered: Sequence[Function],
    requested: Sequence[Function],
    functions: Sequence[Function],
    rng: random.Random,
) -> tuple[Function, ...]:
    used = {function.name for function in requested}
    others = [function for function in functions if function.name not in used]
    similar = [function for function in others if _share_syllable(function, requested[0])]
    first = rng.choice(similar or others)
    others.remove(first)
    rest = rng.sample(others, CATALOGUE_SIZE - 1 - len(offered))
    return tuple(rng.sample([*offered, first, *rest], CATALOGUE_SIZE))


def _share_syllable(one: Function, other: Function) -> bool:
    size = SYLLABLE_CHARS
    return one.name[:size] == other.name[:size] or one.name[size:] == other.name[size:]


def _describe(call: Call, rng: random.Random) -> str:
    values = rng.sample(call.values, len(call.values))
    return f'"{call.function.name}" with {" and ".join(map(format_value, values))}'


def format_value(value: Value) -> str:
    """Return a value as requests write it; the quotes give a name the same tokens as in JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f'"{value}"'
