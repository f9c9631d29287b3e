"""Reads rows of published data sets from local files and writes RL parquet.

Formats by ending: `.parquet`; `.jsonl`, one object a line; `.json`, a list of objects, or one
object a line, as BFCL's files are in spite of their name. Output is written beside its place and
moved there when it is whole. The same rows give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mega_agentrl.data.convert_row import SourceRow
from mega_agentrl.data.table import read_rows

ENDINGS = (".parquet", ".json", ".jsonl")


def read_source(paths: Sequence[Path]) -> list[SourceRow]:
    """All rows of all files, in order.

    Raises ValueError for a file that is missing, empty, of another kind, or damaged.
    """
    return [row for path in paths for row in _read(path)]


def write_rl(rows: Sequence[dict[str, Any]], path: Path, *, force: bool = False) -> None:
    """Write rows of the RL format.

    Raises ValueError for no rows, a folder that is not there, a file that is there without
    `force`, and rows whose columns do not fit together.
    """
    if not rows:
        raise ValueError(f"{path}: got no rows, expected at least one; was everything left out?")
    check_output(path, force=force)
    partial = path.with_name(f"{path.name}.partial")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), partial)
        partial.replace(path)
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: the rows do not fit into one table: {error}; probable cause: a field, of "
            "extra_info for instance, that is a number in some rows and a text in others"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: Path, *, force: bool) -> None:
    """Raises ValueError where `write_rl` would not write, before any work is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path}: expected the path of a file in a folder that exists")
    if path.exists() and not force:
        raise ValueError(f"{path}: is there already; give --force to write over it")


def _read(path: Path) -> list[SourceRow]:
    if path.suffix not in ENDINGS:
        raise ValueError(f"--input {path}: expected a file that ends in {', '.join(ENDINGS)}")
    if path.suffix == ".parquet":
        values = read_rows(path, key="--input", columns=())
        return [SourceRow(str(path), number, row) for number, row in enumerate(values)]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--input {path}: {error.strerror}, expected a readable file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--input {path}: {error}, expected UTF-8; is it compressed?") from error
    is_list = path.suffix == ".json" and text.lstrip().startswith("[")
    rows = _json(text, str(path), 0) if is_list else _lines(text, str(path))
    if not rows:
        raise ValueError(f"--input {path}: the file is empty, expected at least one row")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(  # noqa: TRY004
                f"--input {path} row {number}: got {row!r}, expected an object"
            )
    return [SourceRow(str(path), number, row) for number, row in enumerate(rows)]


def _lines(text: str, file: str) -> list[Any]:
    # Not splitlines: JSON strings may hold characters that it takes for line ends.
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return [_json(line, file, number) for number, line in enumerate(lines)]
    except ValueError:
        # A .json file may hold one object over many lines.
        if file.endswith(".json") and text.lstrip().startswith("{\n"):
            return [_json(text, file, 0)]
        raise


def _json(text: str, file: str, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--input {file} row {number}: got {text[:200]!r}, expected JSON ({error}); probable "
            "cause: a download that broke off, or a file of another kind"
        ) from error
