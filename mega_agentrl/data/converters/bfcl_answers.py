"""Expands the possible answers of a BFCL question into lists of calls.

BFCL gives a list of accepted values for every argument, with the empty text if the argument may be
omitted: `[{"area": {"base": [10], "unit": ["cm", ""]}}]`. Object values list the accepted values of
each of their members in the same way, also inside lists. The expansion is the product of all
choices:

    [{"name": "area", "arguments": {"base": 10, "unit": "cm"}}]
    [{"name": "area", "arguments": {"base": 10}}]

BFCL's own checker is more lenient with texts (it ignores case, spaces and some punctuation) and
accepts an empty text for an omitted argument; here only the listed values count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from mega_agentrl.data.converters.function_calls import format_calls_json, parse_python_call
from mega_agentrl.data.converters.source_row import SourceRow

MAX_ANSWERS = 512
"""Maximum number of possible answers; all of them are parsed for every response."""

_OMITTED = object()


def possible_answers(
    truth: Sequence[Any], parameters: Mapping[str, Sequence[str]], row: SourceRow
) -> list[str] | None:
    """Return every correct list of calls as text, or None if there are over `MAX_ANSWERS`.

    Args:
        truth: one item per call: accepted values by argument, or a Python call.
        parameters: names of the parameters of each function, in order.
        row: the row, for error messages.

    Raises:
        ValueError: an item has another form.
    """
    choices = []
    for item in truth:
        if isinstance(item, str):
            choices.append([parse_python_call(item, parameters, row, "ground_truth")])
            continue
        is_call = isinstance(item, Mapping) and len(item) == 1
        arguments = next(iter(item.values())) if is_call else None
        if not is_call or not isinstance(arguments, Mapping):
            raise row.error("ground_truth", item, "{function: {argument: [accepted values]}}")
        calls = list(islice(_expand_call(item, row), MAX_ANSWERS + 1))
        if len(calls) > MAX_ANSWERS:
            return None
        choices.append(calls)
    texts = (format_calls_json(calls, row, "ground_truth") for calls in product(*choices))
    answers = list(islice(texts, MAX_ANSWERS + 1))
    return None if len(answers) > MAX_ANSWERS else list(dict.fromkeys(answers))


def _expand_call(item: Mapping[str, Any], row: SourceRow) -> Iterator[dict[str, Any]]:
    ((name, arguments),) = item.items()
    for chosen in _expand_arguments(arguments, row):
        yield {"name": name, "arguments": chosen}


def _expand_arguments(options: Mapping[str, Any], row: SourceRow) -> Iterator[dict[str, Any]]:
    """Yield every object with one of the listed values for each member."""
    lists = []
    for name, values in options.items():
        if not isinstance(values, list) or not values:
            raise row.error(f"ground_truth.{name}", values, "a non-empty list of values")
        lists.append(list(islice(_expand_options(values, row), MAX_ANSWERS + 1)))
    for chosen in product(*lists):
        pairs = zip(options, chosen, strict=True)
        yield {name: value for name, value in pairs if value is not _OMITTED}


def _expand_options(values: Iterable[Any], row: SourceRow) -> Iterator[Any]:
    for value in values:
        if value == "":
            yield _OMITTED
        else:
            yield from islice(_expand_value(value, row), MAX_ANSWERS + 1)


def _expand_value(value: Any, row: SourceRow) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from _expand_arguments(value, row)
    elif isinstance(value, list):
        parts = [list(islice(_expand_value(item, row), MAX_ANSWERS + 1)) for item in value]
        yield from (list(chosen) for chosen in product(*parts))
    else:
        yield value
