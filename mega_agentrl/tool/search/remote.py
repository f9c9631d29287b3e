"""Search over HTTP: a retrieval server or a web-search API.

`retrieve` is the server of Search-R1 (arXiv:2503.09516): POST `{"queries": [q], "topk": k,
"return_scores": true}`, answered by `{"result": [[{"document": {"contents": c}, "score": s},
...]]}` with c = title, newline, text. `web` is the format of Serper and Bing: GET with `q` and
`num` (`count`), the key in a header, answered by `{"organic": [{"title", "link", "snippet"}]}`
(`webPages.value` with `name` and `url`). Documents that are null or empty are left out. Both
requests only read, so they may be repeated. Proxies of the environment are not used.

To add an API, add a value to `config.enums.SearchBackend`, its request and the parser of its
response here, and a case to `tests/tool/search/test_remote_search.py`.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import httpx

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.search.local_index import Document, field_text
from mega_agentrl.tool.web.request_cache import RequestCache, cache_key, normalize_query
from mega_agentrl.tool.web.retry import RequestRetrier, raise_for_status, read_body
from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.sections.tools import SearchToolConfig, WebRequestConfig
    from mega_agentrl.tool.web.disk_cache import DiskCache

MAX_QUERY_CHARS = 2000
MAX_BODY_BYTES = 16 << 20


class RemoteSearch:
    """Searches with the configured server; an empty `api_key` is not sent."""

    def __init__(
        self,
        config: SearchToolConfig,
        web: WebRequestConfig,
        cache: DiskCache | None = None,
        api_key: str = "",
    ) -> None:
        self._config = config
        self._timeout_s = web.timeout_s
        self._api_key = api_key
        self._request_cache = RequestCache(cache)
        self._retrier = RequestRetrier(
            timeout_s=web.timeout_s, calls_per_second=web.max_calls_per_s
        )
        # Connections belong to the event loop that opened them.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            WeakKeyDictionary()
        )

    def check_api_key(self) -> None:
        """Raise `ValueError` if a key is configured but missing."""
        name = self._config.api_key_env
        if name and not self._api_key:
            raise ConfigError(
                "tool.search.api_key_env",
                name,
                f"an environment variable with the key of {self._config.source}",
                "it is unset or empty: it was not exported where the run starts",
            )

    async def search(self, query: str, top_k: int) -> list[Document]:
        """Return the best documents, best first.

        Raises:
            ToolInputError: the query is empty or too long.
            TimeoutError: the server missed the deadline.
            RuntimeError: the server failed or its response has an unexpected format.
            ValueError: a cached response is damaged.
        """
        query = normalize_query(query)
        if not query:
            raise ToolInputError("The query is empty.")
        if len(query) > MAX_QUERY_CHARS:
            raise ToolInputError(
                f"The query has {len(query)} characters, expected at most {MAX_QUERY_CHARS}."
            )
        key = cache_key("search", self._config.backend, self._config.source, query, top_k)
        payload, _ = await self._request_cache.get_or_fetch(
            key, lambda: self._fetch_documents(query, top_k)
        )
        return from_builtins(list[Document], json.loads(payload), "documents of a cached query")

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _fetch_documents(self, query: str, top_k: int) -> str:
        body = await self._retrier.run(lambda: self._send_request(query, top_k))
        parse: Callable[[Any, int], list[Document]] = (
            _parse_retrieval_response
            if self._config.backend is SearchBackend.retrieve
            else _parse_web_response
        )
        try:
            documents = parse(json.loads(body), top_k)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"tool.search.source={self._config.source}: unexpected answer format "
                f"({type(error).__name__}: {error}), expected that of "
                f"tool.search.backend={self._config.backend}; the answer begins {body[:80]!r}"
            ) from error
        return json.dumps(to_builtins(documents))

    async def _send_request(self, query: str, top_k: int) -> str:
        config, client = self._config, self._client_for_loop()
        headers = {"Accept-Encoding": "identity"}
        if self._api_key:
            headers |= {"X-API-KEY": self._api_key, "Authorization": f"Bearer {self._api_key}"}
        if config.backend is SearchBackend.retrieve:
            payload = {"queries": [query], "topk": top_k, "return_scores": True}
            request = client.build_request("POST", config.source, json=payload, headers=headers)
        else:
            params: dict[str, str | int] = {"q": query, "num": top_k, "count": top_k}
            url = httpx.URL(config.source).copy_merge_params(params)
            request = client.build_request("GET", url, headers=headers)
        response = await client.send(request, stream=True)
        try:
            raise_for_status(response, f"tool.search.source={config.source}")
            body = await read_body(response, MAX_BODY_BYTES)
        finally:
            await response.aclose()
        if len(body) > MAX_BODY_BYTES:
            raise RuntimeError(
                f"tool.search.source={config.source}: more than {MAX_BODY_BYTES} bytes"
            )
        return body.decode("utf-8", "replace")

    def _client_for_loop(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                timeout=self._timeout_s,
                trust_env=False,
                limits=httpx.Limits(max_connections=128, max_keepalive_connections=32),
            )
        return client


def _parse_retrieval_response(payload: Any, top_k: int) -> list[Document]:
    entries = [entry for entry in payload["result"][0] or () if entry is not None]
    documents = [entry.get("document", entry) for entry in entries]
    documents = [document for document in documents if document is not None]
    if documents and not any("contents" in document for document in documents):
        raise KeyError("contents")
    found: list[Document] = []
    for document in documents:
        title, newline, text = field_text(document.get("contents")).partition("\n")
        if not newline:
            title, text = "", title
        title = title.strip().strip('"')
        if title or text.strip():
            found.append(Document(doc_id=field_text(document.get("id")), title=title, text=text))
    return found[:top_k]


def _parse_web_response(payload: Any, top_k: int) -> list[Document]:
    if "organic" in payload:
        rows = payload["organic"]
    elif payload.get("_type") == "SearchResponse":  # Bing leaves the pages out if there are none
        rows = (payload.get("webPages") or {}).get("value")
    else:
        rows = payload["webPages"]["value"]
    found: list[Document] = []
    for row in rows or ():
        url, title, text = (
            next(filter(None, (field_text(row.get(key)) for key in keys)), "") if row else ""
            for keys in (("link", "url"), ("title", "name"), ("snippet",))
        )
        if url or title or text:
            found.append(Document(doc_id=url, title=title, text=text, url=url))
    return found[:top_k]
