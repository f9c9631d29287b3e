"""The possible answers of a BFCL question, each written out as calls.

BFCL gives every argument a list of values that will do, the empty text among them where it may be
left out: `[{"area": {"base": [10], "unit": ["cm", ""]}}]`. Values that are objects list the values
of each of their members in the same way, also inside lists. Written out, that is every choice of
every argument together:

    [{"name": "area", "arguments": {"base": 10, "unit": "cm"}}]
    [{"name": "area", "arguments": {"base": 10}}]

BFCL's own checker is laxer with texts (it drops case, spaces and some punctuation) and takes an
empty text for a left-out argument; here only what is listed counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from mega_agentrl.data.convert_calls import calls_text, read_python_call
from mega_agentrl.data.convert_row import SourceRow

MAX_ANSWERS = 512
"""More possible answers than these make scoring slow; every one is parsed for every response."""

_LEFT_OUT = object()


def possible_answers(
    truth: Sequence[Any], parameters: Mapping[str, Sequence[str]], row: SourceRow
) -> list[str] | None:
    """Every list of calls that is right, as text; None where there are over `MAX_ANSWERS`.

    truth: one item a call, in either form: of values that will do, or a Python call.
    parameters: by function, its parameters in order. Raises ValueError for another form.
    """
    choices = []
    for item in truth:
        if isinstance(item, str):
            choices.append([read_python_call(item, parameters, row, "ground_truth")])
            continue
        is_call = isinstance(item, Mapping) and len(item) == 1
        arguments = next(iter(item.values())) if is_call else None
        if not is_call or not isinstance(arguments, Mapping):
            raise row.error("ground_truth", item, "{function: {argument: [values that will do]}}")
        calls = list(islice(_calls(item, row), MAX_ANSWERS + 1))
        if len(calls) > MAX_ANSWERS:
            return None
        choices.append(calls)
    texts = (calls_text(calls, row, "ground_truth") for calls in product(*choices))
    answers = list(islice(texts, MAX_ANSWERS + 1))
    return None if len(answers) > MAX_ANSWERS else list(dict.fromkeys(answers))


def _calls(item: Mapping[str, Any], row: SourceRow) -> Iterator[dict[str, Any]]:
    ((name, arguments),) = item.items()
    for chosen in _members(arguments, row):
        yield {"name": name, "arguments": chosen}


def _members(options: Mapping[str, Any], row: SourceRow) -> Iterator[dict[str, Any]]:
    """Every object that takes one of the values listed for each of its members."""
    lists = []
    for name, values in options.items():
        if not isinstance(values, list) or not values:
            raise row.error(f"ground_truth.{name}", values, "a non-empty list of values")
        lists.append(list(islice(_values(values, row), MAX_ANSWERS + 1)))
    for chosen in product(*lists):
        pairs = zip(options, chosen, strict=True)
        yield {name: value for name, value in pairs if value is not _LEFT_OUT}


def _values(values: Iterable[Any], row: SourceRow) -> Iterator[Any]:
    for value in values:
        if value == "":
            yield _LEFT_OUT
        else:
            yield from islice(_written_out(value, row), MAX_ANSWERS + 1)


def _written_out(value: Any, row: SourceRow) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from _members(value, row)
    elif isinstance(value, list):
        parts = [list(islice(_written_out(item, row), MAX_ANSWERS + 1)) for item in value]
        yield from (list(chosen) for chosen in product(*parts))
    else:
        yield value
