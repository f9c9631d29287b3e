"""A full-text index over a JSONL corpus, ranked by BM25.

Each line holds `id`, `title` and `text`. Title and text are searched together; a word of the
title counts twice. A query is a bag of words, whatever characters it holds: no query syntax
is interpreted, so no query is an error. Equal scores keep the corpus's order. The documents
lie in the index itself: one in a folder is mapped into memory, and processes share its pages.
Where the folder comes from is `search_store`'s affair.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tantivy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_WORD = re.compile(r"[^\W_]+")  # as tantivy's default tokenizer cuts
_MAX_WORDS = 64
_MAX_WORD_BYTES = 40  # longer words are not indexed
_TITLE_WEIGHT = 2.0
_WRITER_BYTES = 64 << 20
_TIES = 64
_MAX_TIES = 8192


@dataclass(slots=True, kw_only=True, frozen=True)
class Document:
    """One document that was found. url: where it can be read, if anywhere."""

    doc_id: str
    title: str
    text: str
    url: str = ""


class SearchIndex:
    """Immutable once built; `search` may be called from any thread.

    documents: indexed in order, one after the other; they are not kept in memory where
    `folder`, an empty one, takes the index.
    """

    def __init__(self, documents: Iterable[Document], folder: Path | None = None) -> None:
        schema = _schema()
        place = {} if folder is None else {"path": str(folder), "reuse": False}
        index = tantivy.Index(schema, **place)
        # One writer thread: rows keep their order, so that ties do not depend on timing.
        writer = index.writer(heap_size=_WRITER_BYTES, num_threads=1)
        try:
            _fill(writer, documents)
        except BaseException:
            # Its threads would go on writing into a folder that the caller removes.
            writer.rollback()
            writer.wait_merging_threads()
            raise
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        self._attach(index)

    @classmethod
    def open(cls, folder: Path) -> SearchIndex:
        """The index in a folder that a `SearchIndex` was built in; raises `OSError`."""
        self = cls.__new__(cls)
        try:
            self._attach(tantivy.Index.open(str(folder)))
        except ValueError as error:
            raise OSError(
                f"{folder}: not a readable index ({error}), expected one that was built there; "
                "probable cause: a damaged disk or copy; remove the folder to build it anew"
            ) from error
        return self

    def _attach(self, index: Any) -> None:
        self._schema = index.schema
        self._searcher = index.searcher()

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, top_k: int) -> list[Document]:
        """The best documents, best first; empty where no word of the query occurs."""
        words = dict.fromkeys(word.lower() for word in _WORD.findall(query))
        parts: list[tuple[Any, Any]] = []
        for word in list(words)[:_MAX_WORDS]:
            if len(word.encode("utf-8", "ignore")) > _MAX_WORD_BYTES:
                continue
            title = tantivy.Query.term_query(self._schema, "title", word)
            text = tantivy.Query.term_query(self._schema, "text", word)
            parts.append((tantivy.Occur.Should, tantivy.Query.boost_query(title, _TITLE_WEIGHT)))
            parts.append((tantivy.Occur.Should, text))
        if not parts:
            return []
        return [_document(entry) for entry in self._best(tantivy.Query.boolean_query(parts), top_k)]

    def _best(self, query: Any, top_k: int) -> list[dict[str, list[Any]]]:
        """Entries by falling score, equal ones by row.

        The index breaks ties by address, which is the row only where it is in one piece. Of
        more ties than `_MAX_TIES` it chooses which ones are seen.
        """
        searcher = self._searcher
        if searcher.num_segments <= 1:
            hits = searcher.search(query, top_k, count=False).hits
            return [searcher.doc(address).to_dict() for _, address in hits]
        limit = top_k + _TIES
        hits = searcher.search(query, limit, count=False).hits
        while len(hits) == limit < _MAX_TIES and hits[-1][0] == hits[top_k - 1][0]:
            limit *= 2
            hits = searcher.search(query, limit, count=False).hits
        scored = [(score, searcher.doc(address).to_dict()) for score, address in hits]
        scored.sort(key=lambda pair: (-pair[0], pair[1]["row"][0]))
        return [entry for _, entry in scored[:top_k]]


def read_corpus(path: Path) -> list[Document]:
    """All documents of a JSONL file; raises `ValueError` naming the file and the line."""
    return list(iterate_corpus(path))


def iterate_corpus(path: Path) -> Iterator[Document]:
    """Documents of a JSONL file, one at a time; raises `ValueError` as `read_corpus` does."""
    if not path.is_file():
        raise ValueError(
            f"tool.search.source={path}: no such file, expected JSONL with id, title and text; "
            "probable cause: it has not been made or copied yet, or the run was started elsewhere"
        )
    found = False
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                found = True
                yield _read_line(line, f"tool.search.source={path}, line {number}")
    if not found:
        raise ValueError(f"tool.search.source={path}: no documents, expected at least one line")


def _schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw")
    builder.add_text_field("title", stored=True)
    builder.add_text_field("text", stored=True)
    builder.add_unsigned_field("row", stored=True)
    return builder.build()


def _fill(writer: Any, documents: Iterable[Document]) -> None:
    for row, document in enumerate(documents):
        entry = tantivy.Document(id=document.doc_id, title=document.title, text=document.text)
        entry.add_unsigned("row", row)
        writer.add_document(entry)


def _document(entry: dict[str, list[Any]]) -> Document:
    return Document(doc_id=entry["id"][0], title=entry["title"][0], text=entry["text"][0])


def _read_line(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}), expected one object a line") from error
    missing = {"id", "title", "text"} - set(row if isinstance(row, dict) else ())
    if missing:
        raise ValueError(
            f"{where}: missing {sorted(missing)}, expected an object with id, title and text"
        )
    return Document(doc_id=str(row["id"]), title=str(row["title"]), text=str(row["text"]))
