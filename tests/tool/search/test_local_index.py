"""The index: ranking, odd queries, order of ties, and errors of the corpus."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.tool.search import local_index
from mega_agentrl.tool.search.local_index import (
    Document,
    SearchIndex,
    is_writable,
    iter_corpus,
    open_or_build_index,
)

CITIES = [
    Document(doc_id="1", title="Paris", text="Paris is the capital of France."),
    Document(doc_id="2", title="Lyon", text="Lyon is a city of France near Paris."),
    Document(doc_id="3", title="Ål", text="Ål lies in Norway."),
]
INDEX = SearchIndex(CITIES)


def found(query, top_k=3):
    return [document.doc_id for document in INDEX.search(query, top_k)]


def test_title_and_text_decide_the_rank():
    assert found("paris") == ["1", "2"]
    assert found("PARIS capital?", top_k=1) == ["1"]
    assert found("ål") == ["3"]
    assert found("berlin") == []


@pytest.mark.parametrize(
    "query", ["", "   ", "AND OR NOT", "[* TO", "text:[a TO", *'" title: ( a^ - \\ * \0'.split(" ")]
)
def test_a_query_has_no_syntax(query):
    INDEX.search(query, 3)
    assert found(query + " norway")[0] == "3"


@given(st.text(max_size=60))
def test_any_query_is_answered(query):
    assert len(INDEX.search(query, 2)) <= 2


def test_words_and_queries_may_be_very_long():
    assert found("x" * 100_000 + " norway") == ["3"]
    assert found(" ".join(f"w{i}" for i in range(5000))) == []


def test_ties_keep_the_order_of_the_corpus():
    same = [Document(doc_id=str(i), title="t", text="word") for i in range(300)]
    first = SearchIndex(same).search("word", 300)
    assert [document.doc_id for document in first] == [str(i) for i in range(300)]


def test_ties_keep_the_order_of_the_corpus_in_an_index_of_several_pieces(monkeypatch):
    monkeypatch.setattr(local_index, "_WRITER_HEAP_BYTES", 15_000_000)
    filler = " ".join(f"x{i}" for i in range(400))
    same = [
        Document(doc_id=str(i), title="t", text=f"word {i:05d} {filler}") for i in range(12_000)
    ]
    index = SearchIndex(same)
    assert index._searcher.num_segments > 1
    for top_k in (1, 3, 200):
        assert [d.doc_id for d in index.search("word", top_k)] == [str(i) for i in range(top_k)]


def test_a_corpus_is_read_line_by_line(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "title": "t", "text": "x"}\n\n', encoding="utf-8")
    assert list(iter_corpus(path)) == [Document(doc_id="1", title="t", text="x")]


def test_a_null_in_the_corpus_is_an_empty_text(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": null, "title": null, "text": 3.5}', encoding="utf-8")
    assert list(iter_corpus(path)) == [Document(doc_id="", title="", text="3.5")]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param('{"id": 1, "title": "t", "text": ["x"]}', "={path}, line 1, text", id="list"),
        pytest.param('{"id": 1, "title": "t"}\n', "={path}, line 1", id="no_text"),
        pytest.param(
            '{"id": 1, "title": "t", "text": ""}\n[1]\n', "={path}, line 2", id="no_object"
        ),
        pytest.param("nonsense\n", "={path}, line 1", id="no_json"),
        pytest.param("[" * 100_000 + "\n", "={path}, line 1", id="nested"),
        pytest.param("\n", "", id="empty"),
    ],
)
def test_bad_corpus_names_file_and_line(tmp_path, content, name):
    path = tmp_path / "c.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        list(iter_corpus(path))
    assert caught.value.name == "tool.search.source" + name.format(path=path)


def test_the_line_of_a_wrong_encoding_is_named(tmp_path):
    path = tmp_path / "c.jsonl"
    good = b'{"id": 1, "title": "t", "text": "x"}\n'
    path.write_bytes(good + good.replace(b"x", b"\xe9"))
    with pytest.raises(ConfigError) as caught:
        list(iter_corpus(path))
    assert caught.value.key == f"tool.search.source={path}, line 2"


def write_corpus(path, num=300):
    rows = [{"id": i, "title": f"t{i % 7}", "text": f"w{i % 11} w{i % 5} word"} for i in range(num)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def indexes(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".index"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def test_an_index_on_disk_answers_as_one_in_memory(corpus, tmp_path):
    in_memory = SearchIndex(iter_corpus(corpus))
    on_disk = open_or_build_index(corpus, tmp_path / "ix")
    assert len(on_disk) == 300
    for query in ("w3", "t2 w4", "word", "w1 w2 t0", "nothing"):
        for top_k in (1, 5, 300):
            assert on_disk.search(query, top_k) == in_memory.search(query, top_k)


def test_an_index_is_built_once_for_each_corpus(corpus, tmp_path):
    folder = tmp_path / "ix"
    open_or_build_index(corpus, folder)
    place = folder / indexes(folder)[0]
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    open_or_build_index(corpus, folder)
    assert before == {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    write_corpus(corpus, num=10)
    assert len(open_or_build_index(corpus, folder)) == 10
    assert len(indexes(folder)) == 2


def test_other_users_may_read_the_index(corpus, tmp_path):
    open_or_build_index(corpus, tmp_path / "ix")
    for path in (tmp_path / "ix").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & stat.S_IROTH, path


CHILD = """
import sys, time
from pathlib import Path
from mega_agentrl.tool.search import local_index
build = local_index._build_index
def counted(corpus, place):
    print("built", flush=True)
    time.sleep(float(sys.argv[3]))
    build(corpus, place)
local_index._build_index = counted
index = local_index.open_or_build_index(Path(sys.argv[1]), Path(sys.argv[2]), timeout_s=300)
print(len(index), index.search("w3", 1)[0].doc_id, flush=True)
"""


def start(corpus, folder, delay_s=0.3):
    arguments = [sys.executable, "-c", CHILD, str(corpus), str(folder), str(delay_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_build_the_index_once(corpus, tmp_path):
    children = [start(corpus, tmp_path / "ix") for _ in range(4)]
    answers = [child.communicate(timeout=300)[0].split("\n") for child in children]
    assert sum("built" in lines for lines in answers) == 1
    assert len({tuple(line for line in lines if line != "built") for lines in answers}) == 1
    assert all(child.returncode == 0 for child in children)


def test_a_killed_builder_does_not_block_the_next_one(corpus, tmp_path):
    folder = tmp_path / "ix"
    with start(corpus, folder, delay_s=600) as child:
        assert child.stdout.readline() == "built\n"
        child.kill()
    (leftover,) = [
        folder / f"{path.name.removesuffix('.lock')}.building" for path in folder.iterdir()
    ]
    leftover.mkdir()
    (leftover / "meta.json").write_text("half")
    assert len(open_or_build_index(corpus, folder, timeout_s=60)) == 300
    assert not leftover.exists()
    assert len(indexes(folder)) == 1


def test_waiting_for_another_builder_has_a_timeout(corpus, tmp_path):
    folder = tmp_path / "ix"
    with start(corpus, folder, delay_s=600) as child:
        assert child.stdout.readline() == "built\n"
        (lock,) = folder.iterdir()
        with pytest.raises(TimeoutError, match=lock.name):  # which file to look at
            open_or_build_index(corpus, folder, timeout_s=0.05)
        child.kill()


def test_a_bad_corpus_leaves_no_index(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "title": "t", "text": "x"}\nnonsense\n')
    with pytest.raises(ConfigError) as caught:
        open_or_build_index(path, tmp_path / "ix")
    assert caught.value.key == f"tool.search.source={path}, line 2"
    assert indexes(tmp_path / "ix") == []
    assert not list((tmp_path / "ix").glob("*.building"))
    missing = tmp_path / "none.jsonl"
    with pytest.raises(ConfigError) as caught:
        open_or_build_index(missing, tmp_path / "ix")
    assert (caught.value.key, caught.value.got) == ("tool.search.source", str(missing))


def test_a_folder_that_cannot_be_created_is_named(corpus):
    with pytest.raises(ConfigError) as caught:
        open_or_build_index(corpus, corpus / "below")
    assert (caught.value.key, caught.value.got) == ("tool.search.source", str(corpus))
    assert str(corpus / "below") in caught.value.expected


def test_a_broken_index_is_named(corpus, tmp_path):
    open_or_build_index(corpus, tmp_path)
    place = tmp_path / indexes(tmp_path)[0]
    (place / "meta.json").write_text("{}")
    with pytest.raises(OSError, match=place.name):
        open_or_build_index(corpus, tmp_path)


def test_whether_a_folder_is_writable_is_tried(tmp_path):
    assert is_writable(tmp_path) and list(tmp_path.iterdir()) == []
    assert not is_writable(tmp_path / "missing") and not is_writable(Path("/proc/self"))


SEARCH_AND_MEASURE = """
import sys, resource
from pathlib import Path
from mega_agentrl.tool.search.local_index import open_or_build_index
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = open_or_build_index(Path(sys.argv[1]), Path(sys.argv[2]))
assert index.search("n7", 1)[0].doc_id == "7"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.extended
def test_memory_does_not_hold_the_corpus(tmp_path):
    corpus = tmp_path / "big.jsonl"
    filler = "lorem ipsum dolor " * 600
    with corpus.open("w", encoding="utf-8") as file:
        for i in range(3000):
            file.write(json.dumps({"id": i, "title": f"t{i}", "text": f"n{i} {filler}"}) + "\n")
    open_or_build_index(corpus, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SEARCH_AND_MEASURE, str(corpus), str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    # 32 MB of corpus; the index maps what it touches.
    assert int(done.stdout) * 1024 < corpus.stat().st_size / 2
