"""The search tool over a local index, a retrieval server or a web-search API.

With `top_k` 1 the answer is the best document's text; with more, or where documents have
addresses, one line each: `Page i: title. text`, `Page i: title (url). text`. Texts, and titles,
are cut to an equal share of `tool.answer_tokens` each. The local index is built at `start`; what
servers answer goes through the cache. A query that cannot be asked is the policy's fault, a
deadline is a timeout, a server that fails is ours.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import SearchSource
from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.tool.search_remote import RemoteSearch
from mega_agentrl.tool.search_store import can_write, open_index
from mega_agentrl.tool.snippet import trim
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.search_schema import SearchToolConfig, WebConfig
    from mega_agentrl.tool.cache import DiskCache
    from mega_agentrl.tool.search_index import Document, SearchIndex
    from mega_agentrl.types.ports import TextCodec

NOTHING_FOUND = "No search results found."

_CACHE_WAIT_S = 15.0


class SearchTool(Tool):
    """Looks a query up.

    codec: counts the tokens of a snippet. answer_tokens: of all snippets of an answer together.
    cache: of what servers answer, None keeps nothing.
    fallback_dir: for the index where the corpus's folder cannot be written.
    api_key: what `config.key_env` holds.
    """

    name = "search"
    description = "Searches for documents about a query."
    argument = "query"

    def __init__(
        self,
        config: SearchToolConfig,
        web: WebConfig,
        codec: TextCodec,
        *,
        answer_tokens: int,
        cache: DiskCache | None = None,
        fallback_dir: Path | None = None,
        api_key: str = "",
    ) -> None:
        self._config = config
        self._codec = codec
        self._snippet_tokens = answer_tokens // config.top_k
        self._cache = cache
        self._fallback_dir = fallback_dir
        self._index: SearchIndex | None = None
        self._remote: RemoteSearch | None = None
        self.deadline_s = web.timeout_s
        if config.backend is not SearchSource.local:
            self._remote = RemoteSearch(config, web, cache, api_key)
            # The call keeps its own deadline, after its turn in the pace has come.
            self.deadline_s = 2 * web.timeout_s + _CACHE_WAIT_S

    async def start(self) -> None:
        """Open or build the index; raises `ValueError` for a bad corpus or a missing key."""
        if self._remote is not None:
            self._remote.check_key()
            if self._cache is not None:
                await asyncio.to_thread(self._cache.open)
            return
        corpus = Path(self._config.source)
        self._index = await asyncio.to_thread(lambda: open_index(corpus, self._index_dir(corpus)))

    async def close(self) -> None:
        """Close the connections and the cache."""
        if self._remote is not None:
            await self._remote.close()
        self.close_now()

    def close_now(self) -> None:
        """Close the cache; connections end with the process."""
        if self._cache is not None:
            self._cache.close()

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Look `arguments["query"]` up."""
        try:
            found = await self._find(str(arguments["query"]))
        except TimeoutError as error:
            return ToolAnswer(text=str(error), status=ToolStatus.timeout)
        text = self._render(found) or NOTHING_FOUND
        return ToolAnswer(text=text, metrics={"num_found": float(len(found))})

    async def _find(self, query: str) -> list[Document]:
        if self._remote is not None:
            return await self._remote.find(query, self._config.top_k)
        if self._index is None:
            raise RuntimeError("tool search: execute before start")
        return await asyncio.to_thread(self._index.search, query, self._config.top_k)

    def _index_dir(self, corpus: Path) -> Path:
        if self._fallback_dir is None or can_write(corpus.parent):
            return corpus.parent
        return self._fallback_dir

    def _render(self, found: Sequence[Document]) -> str:
        budget = self._snippet_tokens
        snippets = [trim(" ".join(d.text.split()), self._codec, budget) for d in found]
        if self._config.top_k == 1 and not any(document.url for document in found):
            return snippets[0] if snippets else ""
        return "\n".join(
            f"Page {number}: {trim(_heading(document), self._codec, budget)}. {text}"
            for number, (document, text) in enumerate(zip(found, snippets, strict=True), 1)
        )


def _heading(document: Document) -> str:
    return f"{document.title} ({document.url})" if document.url else document.title
