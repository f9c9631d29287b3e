"""What `data.train` and `data.validation` name: files, remote ones among them, with weights.

One path or a list of them, each as `path` or `path@weight`:

    data.train=a.parquet
    data.train=[a.parquet,b.jsonl@0.5,hf://datasets/me/set@main/c.parquet@2]

`@` needs no quotes for Hydra or a shell. Only a number at the very end is a weight; a file whose
own name ends in one is written with `@1` behind it. A path with a scheme (`s3://`) is fsspec's
and read from a copy in the cache; so is one of this machine with `file://`, for a slow disk.
Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = re.compile(r"(.+)@(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file. weight: how often a prompt of it comes in an epoch, on average."""

    path: str
    weight: float = 1.0

    @property
    def is_copied(self) -> bool:
        """Whether it is copied into the cache before it is read."""
        return "://" in self.path

    @property
    def local_path(self) -> str | None:
        """Where it lies on this machine; None for one that is elsewhere."""
        scheme, separator, path = self.path.partition("://")
        if not separator:
            return self.path
        return path if scheme in _LOCAL_SCHEMES else None


def data_files(value: object, key: str) -> tuple[DataFile, ...]:
    """The files of a setting; none for an empty text.

    Raises `ValueError` for anything but texts, an empty one in a list, a weight of 0, and a file
    that is named twice.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{key}={value!r}: expected a path or a list of them, each with @weight or without; "
            "probable cause: a number or a mapping in its place"
        )
    if value == "":
        return ()
    files = tuple(_data_file(text, key) for text in texts)
    places = [file.local_path or file.path for file in files]
    for file, place in zip(files, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"{key}={value!r}: {file.path} occurs twice, expected each file once; give it a "
                "weight (@2) to draw its prompts more often"
            )
    return files


def _data_file(text: str, key: str) -> DataFile:
    found = _WEIGHT.fullmatch(text.strip())
    path, weight = (found[1], float(found[2])) if found else (text.strip(), 1.0)
    if not path or not 0 < weight <= 1000:
        raise ValueError(
            f"{key}: got the entry {text!r}, expected path or path@weight with a weight above 0, "
            "at most 1000; probable cause: a comma too much, or a file that should not be listed"
        )
    return DataFile(path, weight)
