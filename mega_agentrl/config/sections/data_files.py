"""Parse the file lists of `data.train` and `data.validation`.

A setting is a path or a list of paths, each as `path` or `path@weight`:

    data.train=a.parquet
    data.train=[a.parquet,b.jsonl@0.5,hf://datasets/me/set@main/c.parquet@2]

`@` needs no quotes in Hydra or a shell. Only a number at the very end is a weight; append `@1` to a
file whose own name ends in `@` and a number. A path with a scheme (`s3://`) is read by fsspec
through a copy in the local cache; `file://` caches a file of a slow local disk. This module reads
no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT_RE = re.compile(r"(.+)@(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data setting."""

    path: str
    """Path or fsspec URL."""
    weight: float = 1.0
    """Average number of times that a prompt of the file occurs in an epoch."""

    @property
    def needs_copy(self) -> bool:
        """Whether the file is copied to the local cache before it is read."""
        return "://" in self.path

    @property
    def local_path(self) -> str | None:
        """Path on this machine; None for a remote file."""
        scheme, separator, path = self.path.partition("://")
        if not separator:
            return self.path
        return path if scheme in _LOCAL_SCHEMES else None


def parse_data_files(value: object, key: str) -> tuple[DataFile, ...]:
    """Return the files of a setting; none for an empty string.

    Raises:
        ValueError: a value is not a string, a path in a list is empty, a weight is out of range or
            a file is listed twice.
    """
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or not all(isinstance(one, str) for one in entries):
        raise ValueError(
            f"{key}={value!r}: expected a path or a list of paths, each with an optional @weight; "
            "probable cause: a number or a mapping in its place"
        )
    if value == "":
        return ()
    files = tuple(_parse_data_file(entry, key) for entry in entries)
    paths = [file.local_path or file.path for file in files]
    for file, path in zip(files, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(
                f"{key}={value!r}: {file.path} occurs twice, expected each file once; give it a "
                "weight (@2) to draw its prompts more often"
            )
    return files


def _parse_data_file(entry: str, key: str) -> DataFile:
    found = _WEIGHT_RE.fullmatch(entry.strip())
    path, weight = (found[1], float(found[2])) if found else (entry.strip(), 1.0)
    if not path or not 0 < weight <= 1000:
        raise ValueError(
            f"{key}: got the entry {entry!r}, expected path or path@weight with a weight above 0, "
            "at most 1000; probable cause: an extra comma, or a file that should not be listed"
        )
    return DataFile(path, weight)
