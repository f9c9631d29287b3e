"""Remote files: fetched once for each version, whole for every process that asks at once."""

import contextlib
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data import remote_files as module
from mega_agentrl.data.remote_files import FetchLimits, fetch_to_cache

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/remote", recursive=True)


def test_a_version_is_fetched_once_and_a_new_one_again(memory, tmp_path, monkeypatch):
    fetched = []
    fetch = module._download
    monkeypatch.setattr(module, "_download", lambda *given: (fetched.append(given), fetch(*given)))
    url, folder = "memory://remote/a.jsonl.gz", tmp_path / "cache"
    memory.pipe("/remote/a.jsonl.gz", b"one")
    first = fetch_to_cache(url, folder, key="k")
    assert first.read_bytes() == b"one" and first.name.endswith("-a.jsonl.gz")
    assert fetch_to_cache(url, folder, key="k") == first and len(fetched) == 1
    memory.pipe("/remote/a.jsonl.gz", b"two more")
    second = fetch_to_cache(url, folder, key="k")
    assert (first.read_bytes(), second.read_bytes(), len(fetched)) == (b"one", b"two more", 2)
    memory.pipe("/remote/b.jsonl.gz", b"one")
    assert fetch_to_cache("memory://remote/b.jsonl.gz", folder, key="k") not in (first, second)


def test_a_local_file_with_a_scheme_is_copied(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"one")
    staged = fetch_to_cache(f"file://{tmp_path}/a.jsonl", tmp_path / "shared", key="k")
    (tmp_path / "a.jsonl").unlink()
    assert staged.parent == tmp_path / "shared" and staged.read_bytes() == b"one"


def test_a_failed_fetch_leaves_no_file(memory, tmp_path, monkeypatch):
    memory.pipe("/remote/a.parquet", b"x")

    def breaks(*_, **__):
        raise ConnectionResetError("reset")

    monkeypatch.setattr(type(memory), "get_file", breaks)
    with pytest.raises(ConfigError) as caught:
        fetch_to_cache("memory://remote/a.parquet", tmp_path, key="k")
    assert (caught.value.key, caught.value.got) == ("k", "memory://remote/a.parquet")
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_refused(tmp_path, memory):
    memory.pipe("/remote/a", b"")
    for url in ("memory://remote/b", "nosuch://x/b"):
        with pytest.raises(ConfigError) as caught:
            fetch_to_cache(url, tmp_path, key="data.train")
        assert (caught.value.key, caught.value.got) == ("data.train", url)


@pytest.fixture
def served(tmp_path):
    """A folder and its URL."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given):
            super().__init__(*given, directory=str(folder))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_processes_that_fetch_a_file_at_once_read_it_whole(served, tmp_path):
    folder, url = served
    content = bytes(range(256)) * 20_000
    (folder / "a.parquet").write_bytes(content)
    command = (
        "import sys; from pathlib import Path; from mega_agentrl.data.remote_files import "
        "fetch_to_cache;"
        "copy = fetch_to_cache(sys.argv[1], Path(sys.argv[2]), key='k');"
        "sys.stdout.buffer.write(copy.read_bytes())"
    )
    given = [sys.executable, "-c", command, f"{url}/a.parquet", str(tmp_path / "cache")]
    children = [subprocess.Popen(given, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    assert all(child.communicate(timeout=300)[0] == content for child in children)
    assert len(list((tmp_path / "cache").iterdir())) == 1


class Hostile(http.server.BaseHTTPRequestHandler):
    """Serves `/endless` without a length, `/lying` with one that is too small, `/silent` never."""

    protocol_version = "HTTP/1.1"
    is_over = threading.Event()

    def do_HEAD(self):
        if self.path == "/silent":
            self.is_over.wait(300)
        self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        if self.path == "/large":
            self.send_header("Content-Length", str(1 << 40))
        self.end_headers()

    def do_GET(self):
        self.send_response(200)
        if self.path == "/large":
            self.send_header("Content-Length", str(1 << 40))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        block = bytes(1 << 16)
        with contextlib.suppress(OSError):
            if self.path == "/drops":
                self.wfile.write(b"1\r\n0\r\n")
                self.is_over.wait(300)
            while True:
                self.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def hostile():
    """The URL of a server that does not mean well."""
    Hostile.is_over.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Hostile.is_over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["endless", "large"])
def test_a_file_of_somebody_else_is_refused_while_it_arrives(hostile, tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        fetch_to_cache(
            f"{hostile}/{name}", tmp_path, key="row 1", limits=FetchLimits(max_bytes=1 << 20)
        )
    assert (caught.value.key, caught.value.got) == ("row 1", f"{hostile}/{name}")
    assert caught.value.expected == f"a file of at most {1 << 20} bytes"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["silent", "drops"])
def test_a_file_of_somebody_else_has_to_arrive_in_time(hostile, tmp_path, name):
    limits = FetchLimits(max_bytes=1 << 20, timeout_s=0.2)
    with pytest.raises(ConfigError) as caught:
        fetch_to_cache(f"{hostile}/{name}", tmp_path, key="row 1", limits=limits)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_progress_is_bounded_too(memory, tmp_path, monkeypatch):
    memory.pipe("/remote/a.png", bytes(100))
    info = {"size": None, "name": "a", "type": "file"}
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: info)

    def copies(_, path, target, **__):
        Path(target).write_bytes(bytes(100))

    monkeypatch.setattr(type(memory), "get_file", copies)
    with pytest.raises(ConfigError) as caught:
        fetch_to_cache(
            "memory://remote/a.png", tmp_path, key="row 1", limits=FetchLimits(max_bytes=99)
        )
    assert caught.value.expected == "a file of at most 99 bytes"
    assert list(tmp_path.iterdir()) == []
