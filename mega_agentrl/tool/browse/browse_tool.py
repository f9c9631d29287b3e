"""The browse tool: returns the text of one web page, around the words of a query.

The call's text is the URL, optionally followed by a query; a function call has `url` and `query`.
The whole text of a page is cached, so that another query needs no request; the domain lists apply
to cached pages as well. A page that may not be read, does not exist or fails is an error of the
policy (`user_error`), which sees the reason. A missed deadline is a timeout. A failing resolver or
network is an infrastructure error, unless another page could be read shortly before: then only the
names or addresses of this page fail. `page_text` describes the text of a page.
"""

from __future__ import annotations

import errno
import json
import math
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx

from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.tool.browse.page_fetcher import PageFetcher
from mega_agentrl.tool.browse.page_text import PageTextExtractor
from mega_agentrl.tool.browse.url_rules import UrlRules, resolve_host
from mega_agentrl.tool.snippet import estimate_max_words, text_from_best_window, truncate_to_tokens
from mega_agentrl.tool.web.request_cache import RequestCache, cache_key
from mega_agentrl.tool.web.retry import RequestRetrier, TransientError, total_timeout_s
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.sections.tools import BrowseToolConfig, WebRequestConfig
    from mega_agentrl.tool.browse.url_rules import Resolver
    from mega_agentrl.tool.web.disk_cache import DiskCache
    from mega_agentrl.types.protocols import TextCodec

EMPTY_PAGE_MESSAGE = "The page has no text."

MAX_PAGE_BYTES = 2 << 20
"""Limit of a page's size; the rest of a longer page is not read."""

_FETCHER_VERSION = 1
_NETWORK_PROOF_S = 60.0
"""Time for which an answer of a server proves that resolver and network work."""
_HOST_ERRNOS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_NETWORK_ERRNOS = frozenset((errno.ENETUNREACH, errno.ENETDOWN))


class BrowseTool(Tool):
    """Reads a web page.

    Args:
        codec: counts the tokens of a response.
        exempt_address: for tests, one private address and port that may be read.
        resolve: resolves host names.
    """

    name = "browse"
    description = "Reads a web page and gives the part of its text that is about the query."
    text_argument = "url"
    parameters = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "url": {"type": "string", "description": "address of the page"},
            "query": {"type": "string", "description": "words to look for in it"},
        },
        "required": ["url"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        config: BrowseToolConfig,
        web: WebRequestConfig,
        codec: TextCodec,
        *,
        max_response_tokens: int,
        cache: DiskCache | None = None,
        exempt_address: tuple[str, int] | None = None,
        resolve: Resolver = resolve_host,
    ) -> None:
        self._config = config
        self._codec = codec
        self._max_response_tokens = max_response_tokens
        self._cache = cache
        self._request_cache = RequestCache(cache)
        self._rules = UrlRules(
            allowed_domains=config.domain_filter,
            denied_domains=tuple(config.denied_domains),
            exempt_address=exempt_address,
        )
        self._fetcher = PageFetcher(
            self._rules, max_bytes=MAX_PAGE_BYTES, timeout_s=web.timeout_s, resolve=resolve
        )
        self._retrier = RequestRetrier(
            timeout_s=web.timeout_s, calls_per_second=web.max_calls_per_s
        )
        self._extractor = PageTextExtractor()
        self._last_answer_s = -math.inf
        self.timeout_s = total_timeout_s(web.timeout_s)

    async def start(self) -> None:
        """Open the cache; raises `ValueError` if it cannot be written."""
        if self._cache is not None:
            await call_in_thread(self._cache.open)

    def close_now(self) -> None:
        """End the processes that parse pages, and close the cache; pages in progress fail."""
        self._extractor.close()
        if self._cache is not None:
            self._cache.close()

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Read the page `arguments["url"]`; text after the address there is the query."""
        address, _, rest = str(arguments["url"]).strip().partition(" ")
        query = str(arguments.get("query") or rest)
        try:
            text, cached = await self._cached_page_text(address)
        except TimeoutError as error:
            return ToolResponse(text=str(error), status=ToolStatus.timeout)
        except (TransientError, httpx.HTTPError, httpx.InvalidURL) as error:
            works = time.monotonic() - self._last_answer_s < _NETWORK_PROOF_S
            if _is_infra_error(error, network_works=works):
                raise
            return ToolResponse(
                text=f"The page could not be read: {error}.", status=ToolStatus.user_error
            )
        budget = self._max_response_tokens
        num_words = estimate_max_words(text, self._codec, budget)
        window = await call_in_thread(text_from_best_window, text, query, num_words)
        response_text = truncate_to_tokens(window, self._codec, budget) or EMPTY_PAGE_MESSAGE
        return ToolResponse(text=response_text, metrics={"cached": float(cached)})

    async def _cached_page_text(self, address: str) -> tuple[str, bool]:
        url = str(self._rules.check_url(address))
        key = cache_key("browse", _FETCHER_VERSION, MAX_PAGE_BYTES, url)
        payload, cached = await self._request_cache.get_or_fetch(
            key, lambda: self._fetch_with_retries(url)
        )
        entry = json.loads(payload)
        # The page may have been cached under other domain lists.
        for hop in entry["hops"]:
            self._rules.check_url(hop)
        return str(entry["text"]), cached

    async def _fetch_with_retries(self, url: str) -> str:
        return await self._retrier.run(lambda: self._fetch_and_extract(url), httpx.URL(url).host)

    async def _fetch_and_extract(self, url: str) -> str:
        page = await self._fetcher.fetch(url)
        self._last_answer_s = time.monotonic()
        text = await self._extractor.extract(page)
        return json.dumps({"hops": page.url_chain, "text": text})


def _is_infra_error(error: BaseException, *, network_works: bool) -> bool:
    """Return whether this host, its network or its resolver failed rather than the page's server.

    Args:
        error: What the request ended with.
        network_works: Whether resolver and network are known to work. Names whose servers fail, and
            addresses without a route, such as those of IPv6, are then chosen by the policy.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = getattr(cause, "errno", None)
        if number in _HOST_ERRNOS:
            return True
        if not network_works and (isinstance(cause, socket.gaierror) or number in _NETWORK_ERRNOS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
