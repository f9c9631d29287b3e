"""The cache on disk: what it keeps, lets go, survives, and how damaged files are replaced."""

import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.web import disk_cache
from mega_agentrl.tool.web.disk_cache import DiskCache

MIB = 1 << 20


def make(path, ttl_s=0.0, max_bytes=64 * MIB):
    cache = DiskCache(path, ttl_s=ttl_s, max_bytes=max_bytes)
    cache.open()
    return cache


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sqlite"


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(disk_cache.time, "time", lambda: now[0])
    return now


def aside(path):
    return [p for p in path.parent.glob(f"{path.name}.aside-*") if p.suffix != ".lock"]


def test_an_entry_is_read_by_another_cache_of_the_same_file(path):
    first, second = make(path), make(path)
    assert first.get("a") is None
    assert first.put("a", "one")
    assert second.get("a") == "one"
    assert second.put("a", "zwei ☃")
    assert first.get("a") == "zwei ☃"
    first.close()
    first.close()
    assert first.get("a") == "zwei ☃"


def test_the_folder_of_the_file_is_made(tmp_path):
    assert make(tmp_path / "new" / "folder" / "cache.sqlite").put("a", "one")


def test_an_entry_expires_after_its_time_to_live(path, clock):
    cache, for_ever = make(path, ttl_s=10), make(path, ttl_s=0)
    cache.put("a", "x")
    clock[0] += 10
    assert cache.get("a") == "x"
    clock[0] += 0.5
    assert cache.get("a") is None
    assert for_ever.get("a") == "x"
    cache.put("a", "y")
    assert cache.get("a") == "y"


def test_the_least_recently_used_go_first_and_the_file_stays_small(path, clock):
    cache, value = make(path, max_bytes=MIB), "v" * 4000
    for number in range(150):
        cache.put(f"early{number}", value)
    clock[0] += 100
    for number in range(20):
        assert cache.get(f"early{number}") == value
    for number in range(800):
        clock[0] += 0.01
        assert cache.put(f"late{number}", value)
        if number == 60:
            assert all(cache.get(f"early{kept}") for kept in range(20))
            assert cache.get("early149") == value or cache.get("early21") is None
    assert cache.get("early140") is None
    assert cache.get("late799") == value
    assert cache.get("late700") == value
    assert path.stat().st_size < 1.3 * MIB


def test_a_value_larger_than_the_limit_is_not_stored(path):
    cache = make(path, max_bytes=MIB)
    assert not cache.put("big", "x" * (MIB // 5))
    assert cache.get("big") is None


def test_threads_may_share_a_cache(path):
    cache, failures = make(path), []

    def work(name):
        for number in range(100):
            cache.put(f"{name}{number}", str(number))
            if cache.get(f"{name}{number}") != str(number):
                failures.append((name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    "content",
    [b"this is no database at all " * 400, b"SQLite format 3\0" + b"\xff" * 9000, b"\0" * 8192],
)
def test_a_file_that_is_no_cache_is_renamed(path, content, caplog):
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        cache = make(path)
    assert cache.put("a", "x")
    assert cache.get("a") == "x"
    assert [p.read_bytes() for p in aside(path)] == [content]
    assert "replaced by a new file" in caplog.text


def test_a_cache_of_another_version_is_renamed_not_read(path):
    cache = make(path)
    cache.put("a", "x")
    cache.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    anew = make(path)
    assert anew.get("a") is None
    (old,) = [p for p in aside(path) if not p.name.endswith(("-wal", "-shm"))]
    with sqlite3.connect(old) as connection:
        assert connection.execute("SELECT value FROM entry").fetchall() == [("x",)]


def test_a_file_damaged_while_open_fails_no_call_and_is_renamed_once(path, caplog):
    first, second = make(path), make(path)
    for number in range(500):
        first.put(f"k{number}", "v" * 500)
    first.close()
    second.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(16384)
        file.write(os.urandom(size - 32768))
    with caplog.at_level(logging.WARNING):
        for cache in (first, second):
            assert [cache.get(f"k{number}") for number in range(0, 500, 50)].count(None) > 0
        assert first.put("after", "x")
    assert second.get("after") == "x"
    assert len([p for p in aside(path) if not p.name.endswith(("-wal", "-shm"))]) == 1


def test_a_removed_file_is_created_again(path):
    cache = make(path)
    cache.put("a", "x")
    for name in path.parent.iterdir():
        name.unlink()
    assert cache.get("a") is None
    assert cache.put("a", "y")
    assert make(path).get("a") == "y"


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "cache.sqlite", tmp_path):
        with pytest.raises(ConfigError) as caught:
            make(path)
        assert (caught.value.key, caught.value.got) == ("tool.cache.path", str(path))


def test_a_file_locked_by_another_process_is_a_miss_not_an_error(path, monkeypatch):
    monkeypatch.setattr(disk_cache, "BUSY_TIMEOUT_S", 0.05)
    cache = make(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not cache.put("a", "x")
    other.execute("ROLLBACK")
    other.close()
    assert cache.put("a", "x")


CHILD = """
import json, random, sys, time
from pathlib import Path
from mega_agentrl.tool.web.disk_cache import DiskCache
path, log, seed, count, ttl = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), 0
rng = random.Random(seed)
cache = DiskCache(Path(path), ttl_s=0, max_bytes=512 << 20)
cache.open()
wrong = 0
with open(log, "a", buffering=1) as acknowledged:
    for number in range(count):
        # Half of the keys are everybody's, half are one's own.
        key = f"all{rng.randrange(400)}" if rng.random() < 0.5 else f"{seed}-{number}"
        if rng.random() < 0.5:
            if cache.put(key, json.dumps([key, "v" * rng.randrange(2000)])):
                acknowledged.write(key + "\\n")
        else:
            value = cache.get(key)
            wrong += value is not None and json.loads(value)[0] != key
print("done", wrong, flush=True)
"""


def test_killed_processes_lose_and_damage_no_entry(tmp_path, path):
    """4,000 mixed reads and writes; whoever is killed is killed in the midst of its work."""
    logs = [tmp_path / f"log{seed}" for seed in range(8)]
    victims, children = range(4), []
    for seed in range(8):
        count = 10**6 if seed in victims else 500
        arguments = [sys.executable, "-c", CHILD, str(path), str(logs[seed]), str(seed), str(count)]
        children.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
    try:
        rng = random.Random(0)
        for seed in victims:
            wanted = 150 + 50 * seed
            deadline = time.monotonic() + 300
            while not logs[seed].exists() or logs[seed].read_text().count("\n") < wanted:
                assert time.monotonic() < deadline, f"process {seed} does not get on"
                time.sleep(0.01)
            time.sleep(rng.random() * 0.02)
            os.kill(children[seed].pid, signal.SIGKILL)
        for seed, child in enumerate(children):
            out = child.communicate(timeout=300)[0]
            assert child.returncode == (-signal.SIGKILL if seed in victims else 0)
            assert out == ("" if seed in victims else "done 0\n")
    finally:
        for child in children:
            child.kill()
            child.wait(300)
    acknowledged = [key for log in logs for key in log.read_text().split("\n")[:-1]]
    assert len(acknowledged) >= 4 * 180 + 150 + 200 + 250 + 300
    cache = make(path)
    lost = [key for key in set(acknowledged) if json.loads(cache.get(key) or "[0]")[0] != key]
    assert not lost
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not aside(path)
