"""Rows of published data sets on their way to the RL format of `dataset`.

A `SourceRow` knows the file and the place it came from, so that what is wrong with it can be said
with file, row, field, what was found, what was expected and the probable cause. `rl_row` makes one
row of the RL format. What a source's columns mean is the `convert_*` modules' business.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_agentrl.data.table import without_nulls
from mega_agentrl.types.records import Message

MAX_SHOWN_CHARS = 200
WRONG_SOURCE = "--source names another data set than the file holds"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row as published. number: its place in the file, from 0."""

    file: str
    number: int
    values: Mapping[str, Any]

    def error(self, name: str, got: Any, expected: str, cause: str = WRONG_SOURCE) -> ValueError:
        """What to raise for a field."""
        return ValueError(
            f"{self.file} row {self.number}, field {name}: got {_shown(got)}, expected {expected}; "
            f"probable cause: {cause}"
        )

    def value(self, name: str) -> Any:
        """The field; raises ValueError where there is none."""
        if self.values.get(name) is None:
            raise self.error(name, f"only {sorted(self.values)}", "this field")
        return self.values[name]

    def text(self, name: str) -> str:
        """The field, a text that is not blank."""
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, value, "a text", "an empty or damaged row")
        return value

    def items(self, name: str) -> list[Any]:
        """The field, a list or the JSON text of one."""
        value = self.parsed(name)
        if not isinstance(value, list):
            raise self.error(name, value, "a list, or the JSON text of one")
        return value

    def names(self, name: str) -> list[str]:
        """The field, a list of texts or the JSON text of one; empty where there is none."""
        items = self.items(name) if self.values.get(name) is not None else []
        if not all(isinstance(item, str) for item in items):
            raise self.error(name, items, "a list of texts")
        return items

    def struct(self, name: str) -> dict[str, Any]:
        """The field, named members, with its nulls; empty where there is none."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self.error(name, value, "a struct")
        return value or {}

    def parsed(self, name: str) -> Any:
        """The field, or what its JSON text holds; null members of parquet structs left out."""
        value = self.value(name)
        if not isinstance(value, str):
            return without_nulls(value)
        try:
            return json.loads(value)
        except ValueError as error:
            raise self.error(name, value, f"JSON text ({error})", "a row that was cut") from error


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of the rows. rows: in the RL format. notes: what was done or left out, how often.

    Example: `Converted(rows=[...], notes={"left out: no call expected": 3})`.
    """

    rows: list[dict[str, Any]]
    notes: Counter[str] = field(default_factory=Counter)


def rl_row(
    *,
    data_source: str,
    messages: Sequence[Message],
    ground_truth: str | Sequence[str],
    ability: str,
    extra_info: Mapping[str, Any],
) -> dict[str, Any]:
    """One row of the RL format. extra_info: holds at least `index`, unique in a data_source."""
    truth = ground_truth if isinstance(ground_truth, str) else list(ground_truth)
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": dict(extra_info),
    }


def unique_index(row: SourceRow, place: int, seen: set[str]) -> str:
    """The row's `id`, or its place among all rows where it has none; added to `seen`.

    Raises ValueError for an id that occurred before.
    """
    given = row.values.get("id")
    index = str(place if given is None else given)
    if index in seen:
        raise row.error("id", index, "an id of its own", "a file was given twice, or two splits")
    seen.add(index)
    return index


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
