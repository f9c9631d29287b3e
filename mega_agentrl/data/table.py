"""Reading parquet tables with errors that name the setting, the file and the column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def read_rows(path: str | Path, *, key: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All rows as plain values; `key` is the setting that named the file.

    Raises ValueError for a missing or unreadable file, a missing column, or no rows.
    """
    file = Path(path)
    if not str(path) or not file.is_file():
        raise ValueError(
            f"{key}={path}: no such file, expected a parquet file; is the path relative to "
            "another folder, or was the data not made yet?"
        )
    try:
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{key}={path}: not a readable parquet file: {error}") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{key}={path}: missing column {', '.join(missing)}; got {table.column_names}, "
            f"expected at least {list(columns)}"
        )
    if table.num_rows == 0:
        raise ValueError(f"{key}={path}: the table is empty, expected at least one row")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


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
