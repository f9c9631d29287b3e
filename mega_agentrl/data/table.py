"""Reading tables, parquet or JSON lines, with errors that name setting, file, row and column."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

JSON_LINES = (".jsonl", ".jsonl.gz")


def read_rows(path: str | Path, *, key: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All rows as plain values; `key` is the setting that named the file.

    A file whose name ends in `JSON_LINES` holds one object a line, any other is parquet. Raises
    ValueError for a missing or unreadable file, a missing column, or no rows.
    """
    file = Path(path)
    if not str(path) or not file.is_file():
        raise ValueError(
            f"{key}={path}: no such file, expected a parquet or JSONL file; is the path relative "
            "to another folder, or was the data not made yet?"
        )
    rows = (
        _read_lines(file, f"{key}={path}")
        if file.name.endswith(JSON_LINES)
        else _read_parquet(file, f"{key}={path}", columns)
    )
    if not rows:
        raise ValueError(f"{key}={path}: the table is empty, expected at least one row")
    for number, row in enumerate(rows):
        check_columns(row, columns, f"{key}={path} row {number}")
    return rows


def check_columns(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Raise ValueError naming the columns that a row lacks."""
    if missing := [name for name in columns if name not in row]:
        raise ValueError(
            f"{where}: missing column {', '.join(missing)}; got {sorted(row)}, "
            f"expected at least {list(columns)}"
        )


def _read_parquet(file: Path, where: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{where}: not a readable parquet file: {error}") from error
    check_columns(dict.fromkeys(table.column_names), columns, where)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _read_lines(file: Path, where: str) -> list[dict[str, Any]]:
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}: not a readable file of JSON lines: {error}; expected UTF-8, packed by gzip "
            "where its name ends in .gz; probable cause: a download that broke off"
        ) from error
    # Not splitlines: JSON strings may hold characters that it takes for line ends.
    lines = [line for line in text.split("\n") if line.strip()]
    return [_object(line, f"{where} row {number}") for number, line in enumerate(lines)]


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where}: got {line[:200]!r}, expected JSON ({error}); probable cause: one object "
            "over several lines, or a file of another kind"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {line[:200]!r}, expected an object")  # noqa: TRY004
    return value


def without_nulls(value: Any) -> Any:
    """The value with null members of structs left out, at any depth.

    Parquet gives every row the union of all rows' struct fields; a null is a field the row
    never had.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
