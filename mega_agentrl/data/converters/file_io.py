"""Reads rows of published data sets from local files and writes RL parquet files.

The format is chosen by suffix: `.parquet`; `.jsonl` with one object per line; `.json` with a list
of objects or, as in BFCL, one object per line. Output is written to a temporary file and renamed.
The same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mega_agentrl.config.errors import check_range
from mega_agentrl.config.input_files import parse_json, reading
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.data.table_reader import (
    TableRow,
    parse_json_lines,
    parse_json_object,
    read_rows,
)
from mega_agentrl.errors import InputError
from mega_agentrl.types.atomic_file import atomic_path

SUFFIXES = (".parquet", ".json", ".jsonl")


def read_source_rows(paths: Sequence[Path]) -> list[SourceRow]:
    """Read all rows of all files, in order.

    Raises:
        ValueError: a file is missing, empty, damaged or of an unknown format.
    """
    return [row for path in paths for row in _read_file(path)]


def write_rl_parquet(rows: Sequence[dict[str, Any]], path: Path, *, force: bool = False) -> None:
    """Write rows of the RL format.

    Raises:
        ValueError: there are no rows, their columns do not fit together, the folder does not exist,
            or the file exists and `force` is not set.
    """
    if not rows:
        raise InputError(str(path), "no rows", "at least one", "every row was left out")
    check_output_path(path, force=force)
    try:
        with atomic_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(list(rows)), temporary)
    except pa.ArrowException as error:
        cause = "a field, as of extra_info, that is a number in some rows and a text in others"
        expected = "rows that fit into one table"
        raise InputError(str(path), str(error), expected, cause) from error


def check_output_path(path: Path, *, force: bool) -> None:
    """Raise `ValueError` if `write_rl_parquet` could not write to this path."""
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(str(path), "no such place", "the path of a file in a folder that exists")
    if path.exists() and not force:
        raise InputError(str(path), "a file", "no file there, or --force to overwrite it")


def _read_file(path: Path) -> list[SourceRow]:
    if path.suffix not in SUFFIXES:
        raise InputError("--input", str(path), f"a file that ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        rows = read_rows(path, key="--input", columns=())
    else:
        with reading("--input", path, "a readable file in UTF-8, not compressed"):
            text = path.read_text(encoding="utf-8")
        rows = _parse_text(text, path)
    if not rows:
        raise InputError("--input", str(path), "at least one row", "the file is empty")
    return [SourceRow(str(path), row.place, row.values) for row in rows]


def _parse_text(text: str, path: Path) -> list[TableRow]:
    where = f"--input {path}"
    if path.suffix == ".json" and text.lstrip().startswith("["):
        with reading(where, text, "JSON", "not JSON"):
            values = parse_json(text)
        for number, value in enumerate(values, start=1):
            check_range(isinstance(value, dict), f"{where} row {number}", value, "an object")
        return [TableRow(value, f"row {number}") for number, value in enumerate(values, start=1)]
    try:
        return parse_json_lines(text, where)
    except ValueError:
        # A .json file may contain one object over many lines.
        if path.suffix == ".json" and text.lstrip().startswith("{\n"):
            return [TableRow(parse_json_object(text, where), "row 1")]
        raise
