"""Rows of published data sets, and their conversion to the RL format of `rl_dataset`.

A `SourceRow` knows its file and position, so that errors name file, row, field, the value found,
the value expected and the probable cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.data.table_reader import drop_nulls
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Message

WRONG_SOURCE_CAUSE = "--source names another data set than the file holds"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a published data set."""

    file: str
    place: str
    """`row 3`, or `line 3` of a JSONL file, for error messages."""
    values: Mapping[str, Any]
    """Values by field."""

    def error(
        self, name: str, got: Any, expected: str, cause: str = WRONG_SOURCE_CAUSE
    ) -> InputError:
        """Return the error for a bad field."""
        return InputError(f"{self.file} {self.place}, field {name}", got, expected, cause)

    def get(self, name: str) -> Any:
        """Return the field; raise `ValueError` if it is missing."""
        if self.values.get(name) is None:
            raise self.error(name, f"only {sorted(self.values)}", "this field")
        return self.values[name]

    def get_text(self, name: str) -> str:
        """Return the field, which must be a non-blank text."""
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, value, "a text", "an empty or damaged row")
        return value

    def get_list(self, name: str) -> list[Any]:
        """Return the field, which must be a list or the JSON text of one."""
        value = self.get_json(name)
        if not isinstance(value, list):
            raise self.error(name, value, "a list, or the JSON text of one")
        return value

    def get_strings(self, name: str) -> list[str]:
        """Return the field, a list of texts or its JSON text, or [] if it is missing."""
        items = self.get_list(name) if self.values.get(name) is not None else []
        if not all(isinstance(item, str) for item in items):
            raise self.error(name, items, "a list of texts")
        return items

    def get_dict(self, name: str) -> dict[str, Any]:
        """Return the field, a struct that may have null members, or {} if it is missing."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self.error(name, value, "a struct")
        return value or {}

    def get_json(self, name: str) -> Any:
        """Return the field parsed from JSON text, or, if it is not text, without null members."""
        value = self.get(name)
        if not isinstance(value, str):
            return drop_nulls(value)
        try:
            return parse_json(value)
        except ValueError as error:
            raise self.error(name, value, f"JSON text ({error})", "a row that was cut") from error


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The converted rows of a data set."""

    rows: list[dict[str, Any]]
    """Rows of the RL format."""
    notes: Counter[str] = field(default_factory=Counter)
    """Number of changes and omissions by reason, such as {"left out: no call expected": 3}."""


def convert_each(
    rows: Sequence[SourceRow],
    convert: Callable[[SourceRow, int], Iterable[dict[str, Any]]],
    notes: Counter[str] | None = None,
) -> ConversionResult:
    """Convert row by row, without the rows that are malformed: these are counted, one is named.

    Args:
        rows: The rows of all files.
        convert: Returns the RL rows of a row and its place among `rows`. It raises `InputError` if
            the row is malformed.
        notes: Changes that `convert` counts; they become those of the result.

    Raises:
        InputError: All rows are malformed, as those of another data set; the error of the first.
    """
    result = ConversionResult([], Counter() if notes is None else notes)
    errors = []
    for place, row in enumerate(rows):
        try:
            result.rows.extend(convert(row, place))
        except InputError as error:
            errors.append(error)
    if errors and len(errors) == len(rows):
        raise errors[0]
    if errors:
        result.notes[f"left out: malformed rows; the first is {errors[0]}"] = len(errors)
    return result


def make_rl_row(
    *,
    data_source: str,
    messages: Sequence[Message],
    ground_truth: str | Sequence[str] | None,
    ability: str,
    extra_info: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a row of the RL format; `extra_info` needs an `index` unique in its data source."""
    truth = ground_truth if isinstance(ground_truth, str | None) else list(ground_truth)
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": dict(extra_info),
    }


def unique_row_id(row: SourceRow, place: int, row_ids: set[str]) -> str:
    """Return the row's `id`, or `place` if it has none, and add it to `row_ids`.

    Raises:
        ValueError: the id has occurred before.
    """
    row_id = row.values.get("id")
    index = str(place if row_id is None else row_id)
    if index in row_ids:
        raise row.error("id", index, "a unique id", "a file was given twice, or two splits")
    row_ids.add(index)
    return index
