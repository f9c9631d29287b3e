"""An append-only file of records, from which a killed process continues.

A record is

    length and crc32 of the body (8 bytes each, little-endian), body

A kill during `append` leaves an incomplete record at the end. A machine that loses power may leave
zeros there, and a damaged disk a wrong record anywhere. `recover` returns the records before it,
cuts off the rest and logs one line about it. No record is empty: zeros would be read as an empty
one, because the checksum of nothing is 0.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from mega_agentrl.errors import InputError, abbreviate
from mega_agentrl.types.atomic_file import atomic_path, fsync_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

RecordT = TypeVar("RecordT")

_HEADER = struct.Struct("<QQ")
_logger = logging.getLogger(__name__)


class Journal:
    """Records of bytes, addressed by their offsets; only one process may write.

    Args:
        path: The file; if there is none, the journal is empty. A link, or another thing that is no
            file, is removed with a warning, so that nothing outside of the folder is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def recover(self, decode: Callable[[bytes], RecordT]) -> Iterator[tuple[int, RecordT]]:
        """Yield offset and content of each record, then cut off what follows the last whole one.

        Args:
            decode: Returns the content of a body; at a `ValueError` the journal ends before it.
        """
        if not self._is_file():
            return
        with self.path.open("rb+") as file:
            offset, cause = 0, ""
            while (body := _read_record(file)) is not None:
                try:
                    record = decode(body)
                except ValueError as error:
                    cause = f": {abbreviate(str(error))}"
                    break
                yield offset, record
                offset = file.tell()
            num_lost = os.fstat(file.fileno()).st_size - offset
            if num_lost:
                _logger.warning(
                    "%s: the last %d bytes cannot be read and are dropped%s",
                    self.path,
                    num_lost,
                    cause,
                )
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
            body: The record, not empty.
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

    def _is_file(self) -> bool:
        """Return whether there is a file; a link or a device in its place is removed."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return False
        if stat.S_ISREG(mode):
            return True
        _logger.warning("%s is no plain file; it is removed, and the journal is empty", self.path)
        self.path.unlink()
        return False


def _to_record(body: bytes) -> bytes:
    assert body, "an empty record"
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _read_record(file: BinaryIO) -> bytes | None:
    """Return the body of the record at the file's position; None if it is incomplete or damaged."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(header)
    if not 0 < length <= os.fstat(file.fileno()).st_size - file.tell():
        return None
    body = file.read(length)
    return body if zlib.crc32(body) == crc else None
