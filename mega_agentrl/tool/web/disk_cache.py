"""A cache on disk: one SQLite file that all processes of a machine share.

Every `put` is one transaction in write-ahead mode: if a process is killed, entries for which `put`
returned True remain; a power failure may lose the last entries. An entry older than its time to
live is not returned. Beyond the size limit a batch of the least recently used entries is evicted
(usage is recorded to the minute, so that reads rarely write).

Errors of the cache do not end the run: an entry that cannot be read is a miss, and `put` returns
False for one that cannot be written. A damaged file, or one of another version, is renamed with a
warning and replaced, by one process under a lock file; the others open the new one. Not for network
disks: write-ahead mode needs shared memory.
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

from filelock import BaseFileLock, FileLock

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
CACHE_TTL_S = 7 * 24 * 3600.0
"""Seconds for which a run considers a cached web response valid: a week."""
MAX_CACHE_BYTES = 1 << 30
"""Size limit of the cache on disk; beyond it the least recently used entries are evicted."""

_APPLICATION_ID = 0x6D617274
_LRU_RESOLUTION_S = 60.0
_EVICTION_FRACTION = 0.1
_CORRUPTION_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CREATE_TABLES_SQL = """
CREATE TABLE IF NOT EXISTS entry (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, size INTEGER NOT NULL,
    stored_s REAL NOT NULL, used_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS entry_used ON entry (used_s);
"""

_log = logging.getLogger(__name__)


class ForeignFileError(Exception):
    """The database is not a cache, or is one of another version."""


class DiskCache:
    """A persistent text cache by key.

    Any thread may call it; use one object per process, opened after any fork.

    Args:
        path: the SQLite file.
        ttl_s: time to live of an entry, 0 for no limit.
        max_bytes: size limit of the entries on disk.
    """

    def __init__(self, path: Path, *, ttl_s: float, max_bytes: int) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def open(self) -> None:
        """Open or create the file; raises `ConfigError` if it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                if self._connection is None:
                    self._reopen()
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(
                "tool.cache.path",
                str(self._path),
                "a file on a local disk that can be written",
                f"a folder of another user, or a full disk ({error})",
            ) from error

    def close(self) -> None:
        """Close the file. Safe to call twice; a later `get` or `put` opens it again."""
        with self._lock:
            self._disconnect()

    def get(self, key: str) -> str | None:
        """Return the value, or None if there is none that is recent enough."""
        return self._with_connection(lambda connection: self._get(connection, key), None)

    def put(self, key: str, value: str) -> bool:
        """Store a value; return whether it was stored."""
        return self._with_connection(lambda connection: self._put(connection, key, value), False)

    def _with_connection(
        self, work: Callable[[sqlite3.Connection], ResultT], default: ResultT
    ) -> ResultT:
        with self._lock:
            for _ in range(2):
                try:
                    if self._connection is None or self._is_replaced():
                        self._reopen()
                    assert self._connection is not None
                    return work(self._connection)
                except (sqlite3.DatabaseError, OSError) as error:
                    self._discard_broken_file(error)
                    if not _is_corruption(error):
                        _log.warning("cache %s: %s", self._path, error)
                        break
        return default

    def _get(self, connection: sqlite3.Connection, key: str) -> str | None:
        row = connection.execute(
            "SELECT value, stored_s, used_s FROM entry WHERE key = ?", (key,)
        ).fetchone()
        now_s = time.time()
        if row is None or (self._ttl_s and now_s - row[1] > self._ttl_s):
            return None
        if now_s - row[2] > _LRU_RESOLUTION_S:
            with suppress(sqlite3.OperationalError):
                connection.execute("UPDATE entry SET used_s = ? WHERE key = ?", (now_s, key))
        return str(row[0])

    def _put(self, connection: sqlite3.Connection, key: str, value: str) -> bool:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > self._max_bytes * _EVICTION_FRACTION:
            return False
        now_s = time.time()
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(
                "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?)",
                (key, value, size, now_s, now_s),
            )
            if self._used_bytes(connection) > self._max_bytes:
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
        """Delete expired entries, then a share of the least recently used ones."""
        if self._ttl_s:
            connection.execute(
                "DELETE FROM entry WHERE stored_s < ? AND key != ?", (now_s - self._ttl_s, newest)
            )
        excess = self._used_bytes(connection) - self._max_bytes * (1 - _EVICTION_FRACTION)
        evicted_keys: list[tuple[str]] = []
        rows = connection.execute("SELECT key, size FROM entry ORDER BY used_s, rowid")
        for key, size in rows:
            if excess <= 0:
                break
            if key != newest:
                evicted_keys.append((key,))
                excess -= size
        connection.executemany("DELETE FROM entry WHERE key = ?", evicted_keys)

    def _is_replaced(self) -> bool:
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _reopen(self) -> None:
        """Open the file under the lock file; a damaged or foreign one is renamed first."""
        self._disconnect()
        with self._file_lock():
            try:
                self._connection = _open_connection(self._path)
            except ForeignFileError as error:
                self._quarantine_file(error)
            except sqlite3.DatabaseError as error:
                if not _is_corruption(error):
                    raise
                self._quarantine_file(error)
            if self._connection is None:
                self._connection = _open_connection(self._path)
            self._inode = self._path.stat().st_ino

    def _discard_broken_file(self, error: Exception) -> None:
        """Disconnect, and rename a damaged file unless another process has done so."""
        if _is_corruption(error) and self._inode and not self._is_replaced():
            inode = self._inode
            self._disconnect()
            with suppress(OSError), self._file_lock():
                if self._path.exists() and self._path.stat().st_ino == inode:
                    self._quarantine_file(error)
        self._disconnect()

    def _file_lock(self) -> BaseFileLock:
        """Return the lock between processes, which is released when its holder ends."""
        path = self._path.with_name(f"{self._path.name}.lock")
        return FileLock(path, timeout=BUSY_TIMEOUT_S, mode=0o644, fallback_to_soft=False)

    def _quarantine_file(self, reason: Exception) -> None:
        quarantine_name = f"{self._path.name}.aside-{time.time_ns()}-{os.getpid()}"
        _log.warning(
            "cache %s: %s; renamed to %s and replaced by a new file",
            self._path,
            reason,
            quarantine_name,
        )
        # The log first: if the process is killed in between, no old log is beside a new file.
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(
                    self._path.with_name(f"{quarantine_name}{suffix}")
                )

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None


def _open_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=32,
    )
    try:
        _initialize_database(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _initialize_database(connection: sqlite3.Connection) -> None:
    def pragma(name: str) -> Any:
        return connection.execute(f"PRAGMA {name}").fetchone()

    ids = (pragma("application_id")[0], pragma("user_version")[0])
    if ids == (0, 0) and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        # A typical response fits in one page of 8 KiB.
        pragma("page_size=8192")
    elif ids != (_APPLICATION_ID, SCHEMA_VERSION):
        raise ForeignFileError(
            f"application_id and user_version {ids}, expected {(_APPLICATION_ID, SCHEMA_VERSION)}"
        )
    mode = pragma("journal_mode=WAL")[0]
    if mode != "wal":
        raise sqlite3.OperationalError(
            f"journal mode {mode}, expected wal; probable cause: a network disk"
        )
    pragma("synchronous=NORMAL")
    pragma("journal_size_limit=16777216")
    if ids == (0, 0):
        connection.executescript(
            f"BEGIN IMMEDIATE; {_CREATE_TABLES_SQL} PRAGMA application_id={_APPLICATION_ID};"
            f"PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
        )


def _is_corruption(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _CORRUPTION_CODES
