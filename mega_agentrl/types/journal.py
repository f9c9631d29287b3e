"""An append-only file of records, from which a killed process continues.

A record is

    length and crc32 of the body (8 bytes each, little-endian), body

A kill during `append` leaves an incomplete record at the end, and a damaged disk may leave a wrong
one anywhere. `recover` returns the records before it and cuts off the rest.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

from mega_agentrl.errors import InputError
from mega_agentrl.types.atomic_file import atomic_path, fsync_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_HEADER = struct.Struct("<QQ")


class Journal:
    """Records of bytes, addressed by their offsets; only one process may write.

    Args:
        path: The file; if there is none, the journal is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def recover(self) -> Iterator[tuple[int, bytes]]:
        """Yield offset and body of each record, then cut off what follows the last whole one."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            offset = 0
            while (body := _read_record(file)) is not None:
                yield offset, body
                offset = file.tell()
            file.truncate(offset)

    def read(self, offset: int) -> bytes:
        """Return the body of the record at an offset.

        Raises:
            ValueError: The record is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            body = _read_record(file)
        if body is None:
            cause = "a damaged disk, or two processes that write"
            name = f"{self.path}, offset {offset}"
            raise InputError(name, "a damaged record", "the one that was written there", cause)
        return body

    def append(self, body: bytes, *, fsync: bool = False) -> int:
        """Append a record and return its offset.

        Args:
            body: The record.
            fsync: Wait for the disk, so that the record survives if the machine goes down.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            offset = file.tell()
            file.write(_to_record(body))
        if fsync:
            fsync_path(self.path)
        return offset

    def rewrite(self, bodies: Iterable[bytes], *, fsync: bool = False) -> list[int]:
        """Replace all records atomically and return the offsets of the new ones."""
        offsets: list[int] = []
        with atomic_path(self.path, fsync=fsync) as temporary, temporary.open("wb") as file:
            for body in bodies:
                offsets.append(file.tell())
                file.write(_to_record(body))
        return offsets


def _to_record(body: bytes) -> bytes:
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _read_record(file: BinaryIO) -> bytes | None:
    """Return the body of the record at the file's position; None if it is incomplete or damaged."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(header)
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    body = file.read(length)
    return body if zlib.crc32(body) == crc else None
