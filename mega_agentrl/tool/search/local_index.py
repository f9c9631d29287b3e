"""A full-text index over a JSONL corpus, ranked by BM25.

Each line has `id`, `title` and `text`. Title and text are searched together; a word of the title
counts twice. A query is a bag of words: no query syntax is interpreted, so no query is an error.
Equal scores keep the order of the corpus. The documents are stored in the index; an index in a
folder is memory-mapped, and processes share its pages.

The folder's name contains a digest of the corpus and of the index format, so a changed corpus gets
a new index. The first process takes a lock file, builds in a temporary folder, syncs everything to
disk and renames it; other processes wait for the lock, with a timeout, and find the index. The lock
is released when its holder dies, and the next builder removes the temporary folder of a killed one.
Indexes of older corpora are kept.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import tantivy
from filelock import FileLock, Timeout

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import parse_json, reading
from mega_agentrl.errors import InputError
from mega_agentrl.types.atomic_file import fsync_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_WORD = re.compile(r"[^\W_]+")  # like tantivy's default tokenizer
_MAX_QUERY_WORDS = 64
_MAX_WORD_BYTES = 40  # longer words are not indexed
_TITLE_WEIGHT = 2.0
_WRITER_HEAP_BYTES = 64 << 20
_NUM_EXTRA_HITS = 64
_MAX_HITS = 8192
BUILD_TIMEOUT_S = 3600.0
_FORMAT_VERSION = 1
_READ_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True, frozen=True)
class Document:
    """A search result."""

    doc_id: str
    title: str
    text: str
    """Text of the document, or an excerpt."""
    url: str = ""
    """Address of the document; empty if it has none."""


class SearchIndex:
    """An immutable index; any thread may call `search`.

    Args:
        documents: documents, indexed in order.
        folder: an empty folder for the index; None keeps it in memory.
    """

    def __init__(self, documents: Iterable[Document], folder: Path | None = None) -> None:
        schema = _index_schema()
        index_args = {} if folder is None else {"path": str(folder), "reuse": False}
        index = tantivy.Index(schema, **index_args)
        # One writer thread, so that rows keep their order and ties do not depend on timing.
        writer = index.writer(heap_size=_WRITER_HEAP_BYTES, num_threads=1)
        try:
            _add_documents(writer, documents)
        except BaseException:
            # Otherwise the writer's threads would keep writing to a folder that is removed.
            writer.rollback()
            writer.wait_merging_threads()
            raise
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        self._open_searcher(index)

    @classmethod
    def open(cls, folder: Path) -> SearchIndex:
        """Open the index in a folder that a `SearchIndex` was built in; raises `OSError`."""
        self = cls.__new__(cls)
        try:
            self._open_searcher(tantivy.Index.open(str(folder)))
        except ValueError as error:
            raise OSError(
                f"{folder}: not a readable index ({error}), expected one built by this program; "
                "probable cause: a damaged disk or copy; remove the folder to rebuild it"
            ) from error
        return self

    def _open_searcher(self, index: Any) -> None:
        self._schema = index.schema
        self._searcher = index.searcher()

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, top_k: int) -> list[Document]:
        """Return the best documents, best first; none if no word of the query occurs."""
        words = dict.fromkeys(word.lower() for word in _WORD.findall(query))
        clauses: list[tuple[Any, Any]] = []
        for word in list(words)[:_MAX_QUERY_WORDS]:
            if len(word.encode("utf-8", "ignore")) > _MAX_WORD_BYTES:
                continue
            title = tantivy.Query.term_query(self._schema, "title", word)
            text = tantivy.Query.term_query(self._schema, "text", word)
            clauses.append((tantivy.Occur.Should, tantivy.Query.boost_query(title, _TITLE_WEIGHT)))
            clauses.append((tantivy.Occur.Should, text))
        if not clauses:
            return []
        return [
            _to_document(entry)
            for entry in self._top_entries(tantivy.Query.boolean_query(clauses), top_k)
        ]

    def _top_entries(self, query: Any, top_k: int) -> list[dict[str, list[Any]]]:
        """Return entries by descending score, equal ones by row.

        tantivy breaks ties by address, which equals the row only in an index of one segment. Of
        more than `_MAX_HITS` ties, tantivy chooses which ones are returned.
        """
        searcher = self._searcher
        if searcher.num_segments <= 1:
            hits = searcher.search(query, top_k, count=False).hits
            return [searcher.doc(address).to_dict() for _, address in hits]
        limit = top_k + _NUM_EXTRA_HITS
        hits = searcher.search(query, limit, count=False).hits
        while len(hits) == limit < _MAX_HITS and hits[-1][0] == hits[top_k - 1][0]:
            limit *= 2
            hits = searcher.search(query, limit, count=False).hits
        scored = [(score, searcher.doc(address).to_dict()) for score, address in hits]
        scored.sort(key=lambda pair: (-pair[0], pair[1]["row"][0]))
        return [entry for _, entry in scored[:top_k]]


def iter_corpus(path: Path) -> Iterator[Document]:
    """Yield the documents of a JSONL file; raises `ValueError` naming the file and the line."""
    if not path.is_file():
        raise ConfigError(
            "tool.search.source",
            str(path),
            "a JSONL file with id, title and text",
            "no such file: it was not created or copied yet, or the run started elsewhere",
        )
    has_documents = False
    # Decoded line by line, so that the error of a damaged line has its number.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                has_documents = True
                yield _parse_corpus_line(line, f"tool.search.source={path}, line {number}")
    if not has_documents:
        raise ConfigError("tool.search.source", str(path), "at least one line", "no documents")


def field_text(value: Any) -> str:
    """Return a field of a document as the policy reads it; null is an empty text.

    Raises:
        TypeError: the value is neither a text nor a number nor null.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"got {type(value).__name__}, expected a text, a number or null")
    return str(value)


def _index_schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw")
    builder.add_text_field("title", stored=True)
    builder.add_text_field("text", stored=True)
    builder.add_unsigned_field("row", stored=True)
    return builder.build()


def _add_documents(writer: Any, documents: Iterable[Document]) -> None:
    for row, document in enumerate(documents):
        entry = tantivy.Document(id=document.doc_id, title=document.title, text=document.text)
        entry.add_unsigned("row", row)
        writer.add_document(entry)


def _to_document(entry: dict[str, list[Any]]) -> Document:
    return Document(doc_id=entry["id"][0], title=entry["title"][0], text=entry["text"][0])


def _parse_corpus_line(line: bytes, where: str) -> Document:
    with reading(
        where, line[:200].decode("utf-8", "replace"), "a JSON object in UTF-8", "not JSON"
    ):
        row = parse_json(line.decode())
    missing = {"id", "title", "text"} - set(row if isinstance(row, dict) else ())
    if missing:
        expected = "an object with id, title and text"
        raise InputError(where, f"one without {sorted(missing)}", expected)
    fields: dict[str, str] = {}
    for key in ("id", "title", "text"):
        try:
            fields[key] = field_text(row[key])
        except TypeError as error:
            raise InputError(f"{where}, {key}", row[key], "a text, a number or null") from error
    return Document(doc_id=fields["id"], title=fields["title"], text=fields["text"])


def open_or_build_index(
    corpus: Path, folder: Path, timeout_s: float = BUILD_TIMEOUT_S
) -> SearchIndex:
    """Return the index of `corpus` below `folder`, building it if it does not exist.

    Args:
        corpus: JSONL file.
        folder: parent folder of the index.
        timeout_s: how long to wait for another process that builds it.

    Raises:
        ValueError: the corpus is missing or malformed, or the folder cannot be written.
        TimeoutError: the other process takes longer.
    """
    if not corpus.is_file():
        next(iter_corpus(corpus))
    index_folder = folder / f"{corpus.name}.{_corpus_digest(corpus)}.index"
    if not index_folder.is_dir():
        lock_path = index_folder.with_name(f"{index_folder.name}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(lock_path, timeout=timeout_s, mode=0o644, fallback_to_soft=False):
                if not index_folder.is_dir():
                    _build_index(corpus, index_folder)
        except Timeout as error:
            raise TimeoutError(
                f"{lock_path}: another process has held it for {timeout_s:g} s, expected its "
                "release; probable cause: that process still builds the index, or is stopped"
            ) from error
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                "tool.search.source",
                str(corpus),
                f"a corpus whose index can be written to {folder}",
                f"the folder belongs to another user, or is on a read-only disk ({error})",
            ) from error
    return SearchIndex.open(index_folder)


def is_writable(folder: Path) -> bool:
    """Return whether a file can be created in that folder."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _corpus_digest(corpus: Path) -> str:
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {tantivy.__version__}\n".encode())
    with corpus.open("rb") as file:
        while chunk := file.read(_READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _build_index(corpus: Path, index_folder: Path) -> None:
    """Build the index; the caller holds the lock, so an old temporary folder has no owner."""
    building = index_folder.with_name(f"{index_folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        SearchIndex(iter_corpus(corpus), building)
        for path in building.iterdir():
            path.chmod(0o644)
            fsync_path(path)
        fsync_path(building)
        building.rename(index_folder)
        fsync_path(index_folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
