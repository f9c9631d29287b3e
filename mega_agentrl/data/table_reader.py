"""Reads parquet and JSON Lines tables, with errors that name setting, file, row and column."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")


def read_rows(path: str | Path, *, key: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read all rows of a table as plain values.

    Files whose names end with one of `JSONL_SUFFIXES` have one JSON object per line; all others are
    parquet.

    Raises:
        ValueError: the file, which the configuration key `key` names, is missing or unreadable, has
            no rows, or lacks one of `columns`.
    """
    file = Path(path)
    if not str(path) or not file.is_file():
        raise ValueError(
            f"{key}={path}: no such file, expected a parquet or JSONL file; is the path relative "
            "to another folder, or has the data not been created yet?"
        )
    rows = (
        _read_jsonl(file, f"{key}={path}")
        if file.name.endswith(JSONL_SUFFIXES)
        else _read_parquet(file, f"{key}={path}", columns)
    )
    if not rows:
        raise ValueError(f"{key}={path}: the table is empty, expected at least one row")
    for number, row in enumerate(rows):
        check_columns(row, columns, f"{key}={path} row {number}")
    return rows


def check_columns(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Raise `ValueError` if the row lacks one of the columns."""
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


def _read_jsonl(file: Path, where: str) -> list[dict[str, Any]]:
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}: not a readable JSONL file: {error}; expected UTF-8, compressed with gzip "
            "if its name ends in .gz; probable cause: an incomplete download"
        ) from error
    # Not splitlines: JSON strings may contain characters that it takes for line ends.
    lines = [line for line in text.split("\n") if line.strip()]
    return [_parse_json_object(line, f"{where} row {number}") for number, line in enumerate(lines)]


def _parse_json_object(line: str, where: str) -> dict[str, Any]:
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


def drop_nulls(value: Any) -> Any:
    """Remove null members of structs, at any depth.

    Parquet gives every row the union of all rows' struct fields, with null for those it lacks.
    """
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value
