"""Search over HTTP: a retrieval server, or a web-search API.

`retrieve` is Search-R1's server: POST `{"queries": [q], "topk": k, "return_scores": true}`,
answered by `{"result": [[{"document": {"contents": "title\\ntext"}, "score": s}, ...]]}`.
`web` is the shape of Serper, also over Bing's: GET with `q` and `num` (`count`), the key in a
header, answered by `{"organic": [{"title", "link", "snippet"}]}` (`webPages.value` with `name`
and `url`). Both only ask, so both may be repeated. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import httpx

from mega_agentrl.config.choices import SearchSource
from mega_agentrl.tool.cached_ask import CachedAsk, cache_key, normalise
from mega_agentrl.tool.search_index import Document
from mega_agentrl.tool.web_call import WebCall, check_status, read_at_most

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.search_schema import SearchToolConfig, WebConfig
    from mega_agentrl.tool.cache import DiskCache

MAX_QUERY_CHARS = 2000
MAX_BODY_BYTES = 16 << 20


class RemoteSearch:
    """Asks the configured server. cache: None keeps nothing. api_key: empty sends none."""

    def __init__(
        self,
        config: SearchToolConfig,
        web: WebConfig,
        cache: DiskCache | None = None,
        api_key: str = "",
    ) -> None:
        self._config = config
        self._timeout_s = web.timeout_s
        self._api_key = api_key
        self._asked = CachedAsk(cache)
        self._call = WebCall(timeout_s=web.timeout_s, calls_per_second=web.calls_per_second)
        # Connections belong to the loop they were made on.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            WeakKeyDictionary()
        )

    def check_key(self) -> None:
        """Raise `ValueError` where a key is configured and there is none."""
        name = self._config.key_env
        if name and not self._api_key:
            raise ValueError(
                f"tool.search.key_env={name}: this environment variable is unset or empty, "
                f"expected the key of {self._config.source}; probable cause: it was not exported "
                "where the run was started"
            )

    async def find(self, query: str, top_k: int) -> list[Document]:
        """The best documents, best first.

        Raises `ValueError` for a query that cannot be asked, `TimeoutError` past the deadline,
        `RuntimeError` where the server fails or answers in another shape.
        """
        query = normalise(query)
        if not query:
            raise ValueError("The query is empty.")
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError(
                f"The query has {len(query)} characters, expected at most {MAX_QUERY_CHARS}."
            )
        key = cache_key("search", self._config.backend, self._config.source, query, top_k)
        answer, _ = await self._asked.answer(key, lambda: self._ask(query, top_k))
        return [Document(**entry) for entry in json.loads(answer)]

    async def close(self) -> None:
        """Close the connections of this loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _ask(self, query: str, top_k: int) -> str:
        body = await self._call.run(lambda: self._send(query, top_k))
        who = f"tool.search.source={self._config.source}"
        read: Callable[[Any, int], list[Document]] = (
            _read_retrieved if self._config.backend is SearchSource.retrieve else _read_web
        )
        try:
            found = read(json.loads(body), top_k)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"{who}: an answer of another shape ({type(error).__name__}: {error}), expected "
                f"that of tool.search.backend={self._config.backend}; it began {body[:80]!r}"
            ) from error
        return json.dumps([asdict(document) for document in found])

    async def _send(self, query: str, top_k: int) -> str:
        config, client = self._config, self._client()
        headers = {"Accept-Encoding": "identity"}
        if self._api_key:
            headers |= {"X-API-KEY": self._api_key, "Authorization": f"Bearer {self._api_key}"}
        if config.backend is SearchSource.retrieve:
            payload = {"queries": [query], "topk": top_k, "return_scores": True}
            request = client.build_request("POST", config.source, json=payload, headers=headers)
        else:
            params: dict[str, str | int] = {"q": query, "num": top_k, "count": top_k}
            url = httpx.URL(config.source).copy_merge_params(params)
            request = client.build_request("GET", url, headers=headers)
        response = await client.send(request, stream=True)
        try:
            check_status(response, f"tool.search.source={config.source}")
            body = await read_at_most(response, MAX_BODY_BYTES)
        finally:
            await response.aclose()
        if len(body) > MAX_BODY_BYTES:
            raise RuntimeError(
                f"tool.search.source={config.source}: more than {MAX_BODY_BYTES} bytes"
            )
        return body.decode("utf-8", "replace")

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                timeout=self._timeout_s,
                trust_env=False,
                limits=httpx.Limits(max_connections=128, max_keepalive_connections=32),
            )
        return client


def _read_retrieved(answer: Any, top_k: int) -> list[Document]:
    documents: list[Document] = []
    for entry in answer["result"][0][:top_k]:
        document = entry.get("document", entry)
        title, newline, text = str(document["contents"]).partition("\n")
        if not newline:
            title, text = "", title
        title = title.strip().strip('"')
        documents.append(Document(doc_id=str(document.get("id", "")), title=title, text=text))
    return documents


def _read_web(answer: Any, top_k: int) -> list[Document]:
    rows = answer["organic"] if "organic" in answer else answer["webPages"]["value"]
    documents: list[Document] = []
    for row in rows[:top_k]:
        url = str(row.get("link") or row.get("url") or "")
        title = str(row.get("title") or row.get("name") or "")
        text = str(row.get("snippet") or "")
        documents.append(Document(doc_id=url, title=title, text=text, url=url))
    return documents
