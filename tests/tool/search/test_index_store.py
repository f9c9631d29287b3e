"""The index on disk: built once, by one of many, whole or not at all."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.tool.search.index_store import is_writable, open_or_build_index
from mega_agentrl.tool.search.local_index import SearchIndex, read_corpus


def write_corpus(path, num=300):
    rows = [{"id": i, "title": f"t{i % 7}", "text": f"w{i % 11} w{i % 5} word"} for i in range(num)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def indexes(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".index"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def test_it_answers_as_the_index_in_memory(corpus, tmp_path):
    in_memory, on_disk = (
        SearchIndex(read_corpus(corpus)),
        open_or_build_index(corpus, tmp_path / "ix"),
    )
    assert len(on_disk) == 300
    for query in ("w3", "t2 w4", "word", "w1 w2 t0", "nothing"):
        for top_k in (1, 5, 300):
            assert on_disk.search(query, top_k) == in_memory.search(query, top_k)


def test_it_is_built_once_and_anew_for_another_corpus(corpus, tmp_path):
    folder = tmp_path / "ix"
    open_or_build_index(corpus, folder)
    (place,) = (path for path in folder.iterdir() if path.name.endswith(".index"))
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    open_or_build_index(corpus, folder)
    assert before == {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    write_corpus(corpus, num=10)
    assert len(open_or_build_index(corpus, folder)) == 10
    assert len(indexes(folder)) == 2


def test_other_users_may_read_it(corpus, tmp_path):
    open_or_build_index(corpus, tmp_path / "ix")
    for path in (tmp_path / "ix").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & stat.S_IROTH, path


CHILD = """
import sys, time
from pathlib import Path
from mega_agentrl.tool.search import index_store
build = index_store._build_index
def counted(corpus, place):
    print("built", flush=True)
    time.sleep(float(sys.argv[3]))
    build(corpus, place)
index_store._build_index = counted
index = index_store.open_or_build_index(Path(sys.argv[1]), Path(sys.argv[2]), timeout_s=30)
print(len(index), index.search("w3", 1)[0].doc_id, flush=True)
"""


def start(corpus, folder, delay_s=0.3):
    arguments = [sys.executable, "-c", CHILD, str(corpus), str(folder), str(delay_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_many_processes_build_it_once(corpus, tmp_path):
    children = [start(corpus, tmp_path / "ix") for _ in range(4)]
    answers = [child.communicate(timeout=60)[0].split("\n") for child in children]
    assert sum("built" in lines for lines in answers) == 1
    assert len({tuple(line for line in lines if line != "built") for lines in answers}) == 1
    assert all(child.returncode == 0 for child in children)


def test_a_builder_that_is_killed_leaves_the_way_free(corpus, tmp_path):
    folder = tmp_path / "ix"
    with start(corpus, folder, delay_s=60) as child:
        assert child.stdout.readline() == "built\n"
        child.kill()
    (leftover,) = [
        folder / f"{path.name.removesuffix('.lock')}.building" for path in folder.iterdir()
    ]
    leftover.mkdir()
    (leftover / "meta.json").write_text("half")
    assert len(open_or_build_index(corpus, folder, timeout_s=5)) == 300
    assert not leftover.exists()
    assert len(indexes(folder)) == 1


def test_a_bad_corpus_leaves_no_index(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "title": "t", "text": "x"}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        open_or_build_index(path, tmp_path / "ix")
    assert indexes(tmp_path / "ix") == []
    assert not list((tmp_path / "ix").glob("*.building"))
    with pytest.raises(ValueError, match=r"tool.search.source=.*none.jsonl: no such file"):
        open_or_build_index(tmp_path / "none.jsonl", tmp_path / "ix")


def test_a_folder_that_cannot_be_created_is_named(corpus):
    with pytest.raises(ValueError, match=r"tool.search.source=.*cannot be created.*probable cause"):
        open_or_build_index(corpus, corpus / "below")


def test_a_broken_index_is_an_error_that_names_it(corpus, tmp_path):
    open_or_build_index(corpus, tmp_path)
    (place,) = (tmp_path / name for name in indexes(tmp_path))
    (place / "meta.json").write_text("{}")
    with pytest.raises(OSError, match=place.name):
        open_or_build_index(corpus, tmp_path)


def test_can_write(tmp_path):
    assert is_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not is_writable(tmp_path / "missing")
    if os.path.isdir("/proc/self"):
        assert not is_writable(Path("/proc/self"))


def test_memory_does_not_hold_the_corpus(tmp_path):
    corpus = tmp_path / "big.jsonl"
    filler = "lorem ipsum dolor " * 600
    with corpus.open("w", encoding="utf-8") as file:
        for i in range(3000):
            file.write(json.dumps({"id": i, "title": f"t{i}", "text": f"n{i} {filler}"}) + "\n")
    open_or_build_index(corpus, tmp_path)
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from mega_agentrl.tool.search.index_store import open_or_build_index\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "index = open_or_build_index(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "assert index.search('n7', 1)[0].doc_id == '7'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    # 32 MB of corpus; the index maps what it touches.
    assert int(done.stdout) * 1024 < corpus.stat().st_size / 2
