"""The search tool over a local index, a retrieval server or a web-search API.

With `top_k` 1 the response is the best document's text. With more, or if documents have addresses,
it has one line per document: `Page i: title. text` or `Page i: title (url). text`. Titles and texts
are each cut to an equal share of `tool.max_response_tokens`. The local index is built at `start`;
responses of servers are cached. An invalid query is an error of the policy, a missed deadline is a
timeout, a failing server is an infrastructure error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.tool.search.local_index import is_writable, open_or_build_index
from mega_agentrl.tool.search.remote import RemoteSearch
from mega_agentrl.tool.snippet import truncate_to_tokens
from mega_agentrl.tool.web.retry import total_timeout_s
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.sections.tools import SearchToolConfig, WebRequestConfig
    from mega_agentrl.tool.search.local_index import Document, SearchIndex
    from mega_agentrl.tool.web.disk_cache import DiskCache
    from mega_agentrl.types.protocols import TextCodec

NO_RESULTS_MESSAGE = "No search results found."


class SearchTool(Tool):
    """Searches for documents.

    Args:
        config: section `tool.search`.
        web: section `tool.web`.
        codec: counts the tokens of a snippet.
        max_response_tokens: limit of all snippets of a response together.
        cache: cache of server responses, or None.
        fallback_dir: folder for the index if the corpus's folder cannot be written.
        api_key: the value of the environment variable `config.api_key_env`.
    """

    name = "search"
    description = "Searches for documents about a query."
    text_argument = "query"

    def __init__(
        self,
        config: SearchToolConfig,
        web: WebRequestConfig,
        codec: TextCodec,
        *,
        max_response_tokens: int,
        cache: DiskCache | None = None,
        fallback_dir: Path | None = None,
        api_key: str = "",
    ) -> None:
        self._config = config
        self._codec = codec
        self._snippet_tokens = max_response_tokens // config.top_k
        self._cache = cache
        self._fallback_dir = fallback_dir
        self._index: SearchIndex | None = None
        self._remote: RemoteSearch | None = None
        self.timeout_s = web.timeout_s
        if config.backend is not SearchBackend.local:
            self._remote = RemoteSearch(config, web, cache, api_key)
            self.timeout_s = total_timeout_s(web.timeout_s)

    async def start(self) -> None:
        """Open or build the index; raises `ValueError` for a bad corpus or a missing key."""
        if self._remote is not None:
            self._remote.check_api_key()
            if self._cache is not None:
                await call_in_thread(self._cache.open)
            return
        corpus = Path(self._config.source)
        self._index = await call_in_thread(
            lambda: open_or_build_index(corpus, self._index_dir(corpus))
        )

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
    ) -> ToolResponse:
        """Search for `arguments["query"]`."""
        try:
            documents = await self._search(str(arguments["query"]))
        except TimeoutError as error:
            return ToolResponse(text=str(error), status=ToolStatus.timeout)
        text = self._format_results(documents) or NO_RESULTS_MESSAGE
        return ToolResponse(text=text, metrics={"num_found": float(len(documents))})

    async def _search(self, query: str) -> list[Document]:
        if self._remote is not None:
            return await self._remote.search(query, self._config.top_k)
        if self._index is None:
            raise RuntimeError("tool search: execute was called before start")
        return await call_in_thread(self._index.search, query, self._config.top_k)

    def _index_dir(self, corpus: Path) -> Path:
        if self._fallback_dir is None or is_writable(corpus.parent):
            return corpus.parent
        return self._fallback_dir

    def _format_results(self, documents: Sequence[Document]) -> str:
        budget = self._snippet_tokens
        snippets = [
            truncate_to_tokens(" ".join(d.text.split()), self._codec, budget) for d in documents
        ]
        if self._config.top_k == 1 and not any(document.url for document in documents):
            return snippets[0] if snippets else ""
        titles = [truncate_to_tokens(_format_title(d), self._codec, budget) for d in documents]
        return "\n".join(
            f"Page {number}: {title}. {text}"
            for number, (title, text) in enumerate(zip(titles, snippets, strict=True), 1)
        )


def _format_title(document: Document) -> str:
    return f"{document.title} ({document.url})" if document.url else document.title
