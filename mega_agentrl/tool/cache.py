"""Answers on disk: one SQLite file that all processes of a machine share.

Every `put` is one transaction in write-ahead mode, so a process may be killed at any moment and
what was acknowledged (`put` returned True) stays; a power failure may cost the last entries. An
entry older than its time to live is not given out. Beyond the size bound a batch of the least
recently used goes (use is noted to the minute, so that reading rarely writes).

A cache may fail but not the run: what cannot be read is a miss, what cannot be written is not
acknowledged. A damaged file, or one of another version, is set aside under another name with a
warning and a new one begun, by one process under a lock file; others notice and open the new
one. Not for network disks: write-ahead mode needs shared memory.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.tool.file_lock import hold

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

VERSION = 1
BUSY_S = 5.0
TTL_S = 7 * 24 * 3600.0
"""How long a run takes an answer of the web for true: a week."""
SIZE_BYTES = 1 << 30
"""What a run's answers may take on disk; beyond it the least recently used go."""

_APPLICATION_ID = 0x6D617274
_TOUCH_S = 60.0
_EVICTED_SHARE = 0.1
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
CREATE TABLE IF NOT EXISTS entry (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, size INTEGER NOT NULL,
    stored_s REAL NOT NULL, used_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS entry_used ON entry (used_s);
"""

_log = logging.getLogger(__name__)


class ForeignFileError(Exception):
    """The file is a database, but not this cache's or not of its version."""


class DiskCache:
    """Text by key. Any thread may call; use one object per process, opened after any fork.

    ttl_s: 0 is for ever. size_bytes: bound of the entries on disk.
    """

    def __init__(self, path: Path, *, ttl_s: float, size_bytes: int) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def open(self) -> None:
        """Open or begin the file; raises `ValueError` where it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                if self._connection is None:
                    self._reopen()
        except (OSError, sqlite3.OperationalError) as error:
            raise ValueError(
                f"tool.cache.path={self._path}: cannot be opened for writing ({error}), expected a "
                "file on a local disk; probable cause: a folder of another user, or a full disk"
            ) from error

    def close(self) -> None:
        """Close the file; safe to call twice. A later `get` or `put` opens it again."""
        with self._lock:
            self._drop()

    def get(self, key: str) -> str | None:
        """The value, None where there is none that is young enough."""
        return self._guarded(lambda connection: self._get(connection, key), None)

    def put(self, key: str, value: str) -> bool:
        """Store a value; True once it is stored, False where it was not."""
        return self._guarded(lambda connection: self._put(connection, key, value), False)

    def _guarded(
        self, work: Callable[[sqlite3.Connection], ResultT], otherwise: ResultT
    ) -> ResultT:
        with self._lock:
            for _ in range(2):
                try:
                    if self._connection is None or self._is_replaced():
                        self._reopen()
                    assert self._connection is not None
                    return work(self._connection)
                except (sqlite3.DatabaseError, OSError) as error:
                    self._drop_broken(error)
                    if not _is_damage(error):
                        _log.warning("cache %s: %s", self._path, error)
                        break
        return otherwise

    def _get(self, connection: sqlite3.Connection, key: str) -> str | None:
        row = connection.execute(
            "SELECT value, stored_s, used_s FROM entry WHERE key = ?", (key,)
        ).fetchone()
        now_s = time.time()
        if row is None or (self._ttl_s and now_s - row[1] > self._ttl_s):
            return None
        if now_s - row[2] > _TOUCH_S:
            with suppress(sqlite3.OperationalError):
                connection.execute("UPDATE entry SET used_s = ? WHERE key = ?", (now_s, key))
        return str(row[0])

    def _put(self, connection: sqlite3.Connection, key: str, value: str) -> bool:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > self._size_bytes * _EVICTED_SHARE:
            return False
        now_s = time.time()
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(
                "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?)",
                (key, value, size, now_s, now_s),
            )
            if self._used_bytes(connection) > self._size_bytes:
                self._evict(connection, key, now_s)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return True

    def _used_bytes(self, connection: sqlite3.Connection) -> int:
        page_count, num_free, page_bytes = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((page_count - num_free) * page_bytes)

    def _evict(self, connection: sqlite3.Connection, newest: str, now_s: float) -> None:
        """Delete what is too old, then a share of the rest, the least recently used first."""
        if self._ttl_s:
            connection.execute(
                "DELETE FROM entry WHERE stored_s < ? AND key != ?", (now_s - self._ttl_s, newest)
            )
        excess = self._used_bytes(connection) - self._size_bytes * (1 - _EVICTED_SHARE)
        doomed: list[tuple[str]] = []
        rows = connection.execute("SELECT key, size FROM entry ORDER BY used_s, rowid")
        for key, size in rows:
            if excess <= 0:
                break
            if key != newest:
                doomed.append((key,))
                excess -= size
        connection.executemany("DELETE FROM entry WHERE key = ?", doomed)

    def _is_replaced(self) -> bool:
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _reopen(self) -> None:
        """Open the file under the lock file; a damaged or foreign one is set aside first."""
        self._drop()
        with hold(self._path.with_name(f"{self._path.name}.lock"), BUSY_S):
            try:
                self._connection = _connect(self._path)
            except ForeignFileError as error:
                self._set_aside(error)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
            if self._connection is None:
                self._connection = _connect(self._path)
            self._inode = self._path.stat().st_ino

    def _drop_broken(self, error: Exception) -> None:
        """Let go of the file; set it aside where it is damaged and nobody else has done so."""
        if _is_damage(error) and self._inode and not self._is_replaced():
            inode = self._inode
            self._drop()
            with suppress(OSError), hold(self._path.with_name(f"{self._path.name}.lock"), BUSY_S):
                if self._path.exists() and self._path.stat().st_ino == inode:
                    self._set_aside(error)
        self._drop()

    def _set_aside(self, reason: Exception) -> None:
        mark = f"{self._path.name}.aside-{time.time_ns()}-{os.getpid()}"
        _log.warning("cache %s: %s; set aside as %s, begun anew", self._path, reason, mark)
        # The log first: killed in between, it must not lie beside a new file.
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(self._path.with_name(f"{mark}{suffix}"))

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=32
    )
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    def pragma(name: str) -> Any:
        return connection.execute(f"PRAGMA {name}").fetchone()

    marks = (pragma("application_id")[0], pragma("user_version")[0])
    if marks == (0, 0) and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        # 8 KiB pages hold a typical answer in one piece.
        pragma("page_size=8192")
    elif marks != (_APPLICATION_ID, VERSION):
        raise ForeignFileError(f"marks {marks}, expected {(_APPLICATION_ID, VERSION)}")
    mode = pragma("journal_mode=WAL")[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"journal mode {mode}, expected wal: a network disk?")
    pragma("synchronous=NORMAL")
    pragma("journal_size_limit=16777216")
    if marks == (0, 0):
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id={_APPLICATION_ID};"
            f"PRAGMA user_version={VERSION}; COMMIT;"
        )


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGE
