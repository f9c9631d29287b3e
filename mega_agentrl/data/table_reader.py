"""Reads parquet and JSON Lines tables, with errors that name setting, file, row and column.

Errors count the rows of parquet files from 1, and the lines of JSONL files as editors do, blank
ones included.
"""

from __future__ import annotations

import gzip
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import MAX_DEPTH, parse_json, reading
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_VALUES = 100_000_000
"""Largest number of rows times columns of a parquet file, as each becomes an object of Python. A
file of a few hundred bytes can claim any number."""
MAX_EXPANSION = 100
"""Largest ratio of a compressed JSONL file's content to its size, beyond `MIN_EXPANDED_BYTES`. JSON
texts are compressed 3 to 20 times, and zeros 1,000 times."""
MIN_EXPANDED_BYTES = 256 << 20
"""Content of a compressed JSONL file that is read whatever its size."""

_GZIP_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table."""

    values: dict[str, Any]
    """Values by column."""
    place: str
    """`row 3` of a parquet file or `line 3` of a JSONL file, for error messages."""


def read_rows(path: str | Path, *, key: str, columns: Sequence[str]) -> list[TableRow]:
    """Read all rows of a table as plain values.

    Files whose names end with one of `JSONL_SUFFIXES` have one JSON object per line; all others are
    parquet.

    Raises:
        ValueError: the file, which the configuration key `key` names, is missing or unreadable, has
            no rows, or lacks one of `columns`. The error names the row if only one row is damaged.
    """
    file = Path(path)
    if not os.path.isfile(path):
        raise ConfigError(
            key,
            str(path),
            "a parquet or JSONL file",
            "no such file: the path is relative to another folder, or the data has not been "
            "created yet",
        )
    rows = (
        _read_jsonl(file, key)
        if file.name.endswith(JSONL_SUFFIXES)
        else _read_parquet(file, key, columns)
    )
    if not rows:
        raise ConfigError(key, str(path), "at least one row", "the table is empty")
    for row in rows:
        check_columns(row.values, columns, f"{key}={path} {row.place}")
    return rows


def check_columns(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Raise `ValueError` if the row lacks one of the columns."""
    if missing := [name for name in columns if name not in row]:
        raise InputError(
            where, sorted(row), f"at least the columns {list(columns)}", f"{missing} missing"
        )


def check_nesting(row: Mapping[str, Any], where: str) -> None:
    """Raise a `ConfigError` if a value of the row is nested more than `MAX_DEPTH` deep."""
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, np.ndarray) and value.dtype == object:
                below += value.tolist()
        if not below:
            return
        level = below
    expected = f"values that are nested at most {MAX_DEPTH} deep"
    raise ConfigError(
        where, f"columns {sorted(row)}", expected, "a row made by mistake, or an attack"
    )


def _read_parquet(file: Path, key: str, columns: Sequence[str]) -> list[TableRow]:
    import pyarrow.parquet as pq

    with reading(key, file, "a complete parquet file", "not a readable parquet file"):
        # After a read with threads, the process may hang at exit (apache/arrow#50482).
        _check_num_values(pq.read_metadata(file))
        table = pq.read_table(file, use_threads=False)
        names = table.column_names
    where = f"{key}={file}"
    check_columns(dict.fromkeys(names), columns, where)
    values = [
        _column_values(column, name, where)
        for name, column in zip(names, table.columns, strict=True)
    ]
    return [
        TableRow(dict(zip(names, row, strict=True)), f"row {number}")
        for number, row in enumerate(zip(*values, strict=True), start=1)
    ]


def _check_num_values(metadata: pq.FileMetaData) -> None:
    num_columns = max(1, metadata.num_columns)
    if metadata.num_rows * num_columns > MAX_VALUES:
        shape = f"{metadata.num_rows} rows of {num_columns} columns"
        raise ValueError(f"{shape}, more than {MAX_VALUES} values")


def _column_values(column: pa.ChunkedArray, name: str, where: str) -> list[Any]:
    """Return the values as Python objects, some of which have a smaller range, such as dates."""
    expected = "values that Python can represent"
    with reading(f"{where}, column", name, expected):
        depth, level = 0, [column.type]
        while level:
            depth += 1
            level = [kind.field(i).type for kind in level for i in range(kind.num_fields)]
            if depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep")
    try:
        values: list[Any] = column.to_pylist()
    except Exception:  # the loop raises it with the number of the row
        for number, value in enumerate(column, start=1):
            with reading(f"{where} row {number}, column", name, expected):
                value.as_py()
        raise
    return values


def _read_jsonl(file: Path, key: str) -> list[TableRow]:
    expected = "a complete JSONL file in UTF-8, compressed with gzip if its name ends in .gz"
    with reading(key, file, expected, "not a readable JSONL file"):
        text = (_decompress(file) if file.suffix == ".gz" else file.read_bytes()).decode()
    return parse_json_lines(text, f"{key}={file}")


def _decompress(file: Path) -> bytes:
    """Return the content of a gzip file; raise `ValueError` if it is too much for its size."""
    most = max(MIN_EXPANDED_BYTES, MAX_EXPANSION * file.stat().st_size)
    content = bytearray()
    with gzip.open(file) as stream:
        while piece := stream.read(_GZIP_PIECE):
            content += piece
            if len(content) > most:
                raise ValueError(f"more than {most} bytes from {file.stat().st_size} compressed")
    return bytes(content)


def parse_json_lines(text: str, where: str) -> list[TableRow]:
    """Return the objects in the lines of a text; raise a `ConfigError` for any other line.

    Args:
        text: the content of a file; blank lines are skipped.
        where: setting and file, for errors.
    """
    # Not splitlines: JSON strings may contain characters that it takes for line ends.
    return [
        TableRow(parse_json_object(line, f"{where} line {number}"), f"line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """Return the object in a JSON text; raise a `ConfigError` that names `where` for others."""
    expected = "JSON, one object per line"
    with reading(where, text, expected, "not JSON"):
        value = parse_json(text)
    if not isinstance(value, dict):
        raise ConfigError(where, text, expected, f"got a {type(value).__name__}")
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


def plain_value(value: Any) -> Any:
    """Return a cell with lists and numbers of Python, at any depth.

    Arrays and scalars of numpy, as pandas has them, and tuples occur in the rows of a user's
    dataset, decimal numbers in parquet files. Other values stay as they are.
    """
    if isinstance(value, Mapping):
        return {name: plain_value(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # a number for a scalar
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value
