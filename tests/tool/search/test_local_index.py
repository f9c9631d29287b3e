"""The index: ranking, odd queries, order of ties, and errors of the corpus."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.search import local_index as search_index
from mega_agentrl.tool.search.local_index import Document, SearchIndex, read_corpus

CITIES = [
    Document(doc_id="1", title="Paris", text="Paris is the capital of France."),
    Document(doc_id="2", title="Lyon", text="Lyon is a city of France near Paris."),
    Document(doc_id="3", title="Ål", text="Ål lies in Norway."),
]
INDEX = SearchIndex(CITIES)


def found(query, top_k=3):
    return [document.doc_id for document in INDEX.search(query, top_k)]


def test_title_and_text_rank():
    assert found("paris") == ["1", "2"]
    assert found("PARIS capital?", top_k=1) == ["1"]
    assert found("ål") == ["3"]
    assert found("berlin") == []


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   ",
        '"',
        "title:",
        "AND OR NOT",
        "(",
        "a^",
        "[* TO",
        "text:[a TO",
        "-",
        "\\",
        "*",
        "\0",
    ],
)
def test_syntax_is_only_characters(query):
    INDEX.search(query, 3)
    assert found(query + " norway")[0] == "3"


def test_a_word_may_be_very_long():
    assert found("x" * 100_000 + " norway") == ["3"]
    assert len(found(" ".join(f"w{i}" for i in range(5000)))) == 0


@given(st.text(max_size=60))
def test_never_raises(query):
    assert len(INDEX.search(query, 2)) <= 2


def test_ties_keep_the_order_of_the_corpus():
    same = [Document(doc_id=str(i), title="t", text="word") for i in range(300)]
    first = SearchIndex(same).search("word", 300)
    assert [document.doc_id for document in first] == [str(i) for i in range(300)]


def test_ties_keep_the_order_of_the_corpus_in_an_index_of_several_pieces(monkeypatch):
    monkeypatch.setattr(search_index, "_WRITER_HEAP_BYTES", 15_000_000)
    filler = " ".join(f"x{i}" for i in range(400))
    same = [
        Document(doc_id=str(i), title="t", text=f"word {i:05d} {filler}") for i in range(12_000)
    ]
    index = SearchIndex(same)
    assert index._searcher.num_segments > 1
    for top_k in (1, 3, 200):
        assert [d.doc_id for d in index.search("word", top_k)] == [str(i) for i in range(top_k)]


def test_corpus_is_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "title": "t", "text": "x"}\n\n', encoding="utf-8")
    assert read_corpus(path) == [Document(doc_id="1", title="t", text="x")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1, "title": "t"}\n', r"line 1: missing \['text'\]"),
        ('{"id": 1, "title": "t", "text": ""}\n[1]\n', "line 2: missing"),
        ("nonsense\n", "line 1: not JSON"),
        ("\n", "no documents"),
    ],
)
def test_bad_corpus_names_file_and_line(tmp_path, content, message):
    path = tmp_path / "c.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_corpus(path)
    with pytest.raises(ValueError, match="no such file"):
        read_corpus(tmp_path / "none.jsonl")
