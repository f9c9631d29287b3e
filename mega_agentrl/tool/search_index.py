"""A full-text index in memory over a JSONL corpus, ranked by BM25.

Each line holds `id`, `title` and `text`. Title and text are searched together; a word of the
title counts twice. A query is a bag of words, whatever characters it holds: no query syntax
is interpreted, so no query is an error. Equal scores keep the corpus's order.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tantivy

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORD = re.compile(r"[^\W_]+")  # as tantivy's default tokenizer cuts
_MAX_WORDS = 64
_MAX_WORD_BYTES = 40  # longer words are not indexed
_TITLE_WEIGHT = 2.0
_WRITER_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True, frozen=True)
class Document:
    """One document of the corpus."""

    doc_id: str
    title: str
    text: str


class SearchIndex:
    """Immutable once built; `search` may be called from any thread."""

    def __init__(self, documents: Iterable[Document]) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("title")
        builder.add_text_field("text")
        builder.add_unsigned_field("row", stored=True)
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        self._documents = list(documents)
        # One writer thread: rows keep their order, so that ties do not depend on timing.
        writer = self._index.writer(heap_size=_WRITER_BYTES, num_threads=1)
        for row, document in enumerate(self._documents):
            entry = tantivy.Document(title=document.title, text=document.text)
            entry.add_unsigned("row", row)
            writer.add_document(entry)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()

    def __len__(self) -> int:
        return len(self._documents)

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
        searcher = self._index.searcher()
        hits = searcher.search(tantivy.Query.boolean_query(parts), top_k).hits
        rows = [searcher.doc(address).to_dict()["row"][0] for _, address in hits]
        return [self._documents[row] for row in rows]


def read_corpus(path: Path) -> list[Document]:
    """Documents of a JSONL file; raises `ValueError` naming the file and the line."""
    if not path.is_file():
        raise ValueError(
            f"tool.search.corpus={path}: no such file, expected JSONL with id, title and text"
        )
    documents: list[Document] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                documents.append(_read_line(line, f"tool.search.corpus={path}, line {number}"))
    if not documents:
        raise ValueError(f"tool.search.corpus={path}: no documents, expected at least one line")
    return documents


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
