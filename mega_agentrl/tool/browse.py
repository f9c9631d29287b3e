"""The browse tool: one page of the public web, as text, around what is looked for in it.

The call's text is the page's address, then, if wanted, words to look for; as a function, `url`
and `query`. The text of a page is cached whole, so that another query costs no fetch; the
domain lists hold for cached pages as well. A page that may not be read, does not exist or fails
is the policy's choice (`user_error`): it sees why. A deadline is a timeout; a resolver or a
network that fails is ours.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from mega_agentrl.tool.browse_address import DomainRules, resolve_with_system
from mega_agentrl.tool.browse_fetch import PageFetcher
from mega_agentrl.tool.browse_text import page_text
from mega_agentrl.tool.cached_ask import CachedAsk, cache_key
from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.tool.snippet import from_window, trim, words_that_fit
from mega_agentrl.tool.web_call import PassingError, WebCall
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.search_schema import BrowseToolConfig, WebConfig
    from mega_agentrl.tool.browse_address import Resolve
    from mega_agentrl.tool.cache import DiskCache
    from mega_agentrl.types.ports import TextCodec

NO_TEXT = "The page has no text."

MAX_PAGE_BYTES = 2 << 20
"""Beyond it a page is not read."""

_CACHE_WAIT_S = 15.0
_FETCHER_VERSION = 1
_NUM_READERS = 2
_OURS = frozenset(
    (errno.ENETUNREACH, errno.ENETDOWN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
)


class BrowseTool(Tool):
    """Reads a page.

    codec: counts the tokens of an answer, at most `answer_tokens`. cache: None keeps nothing.
    admit: for tests, one private address and port that may be read. resolve: how names become
    addresses.
    """

    name = "browse"
    description = "Reads a web page and gives the part of its text that is about the query."
    argument = "url"
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
        web: WebConfig,
        codec: TextCodec,
        *,
        answer_tokens: int,
        cache: DiskCache | None = None,
        admit: tuple[str, int] | None = None,
        resolve: Resolve = resolve_with_system,
    ) -> None:
        self._config = config
        self._codec = codec
        self._answer_tokens = answer_tokens
        self._cache = cache
        self._asked = CachedAsk(cache)
        self._rules = DomainRules(allow=config.only, deny=tuple(config.deny), admit=admit)
        self._fetcher = PageFetcher(
            self._rules, max_bytes=MAX_PAGE_BYTES, timeout_s=web.timeout_s, resolve=resolve
        )
        self._call = WebCall(timeout_s=web.timeout_s, calls_per_second=web.calls_per_second)
        # Their own threads: a page that takes long to read holds up other pages only.
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="browse")
        # The call keeps its own deadline, after its turn in the pace has come.
        self.deadline_s = 2 * web.timeout_s + _CACHE_WAIT_S

    async def start(self) -> None:
        """Open the cache; raises `ValueError` where it cannot be written."""
        if self._cache is not None:
            await asyncio.to_thread(self._cache.open)

    async def close(self) -> None:
        """Let the readers end and close the cache."""
        self.close_now()

    def close_now(self) -> None:
        """As `close`; a page that is being read is read to its end."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Read the page `arguments["url"]`; what follows the address there is the query."""
        address, _, rest = str(arguments["url"]).strip().partition(" ")
        query = str(arguments.get("query") or rest)
        try:
            text, cached = await self._text(address)
        except TimeoutError as error:
            return ToolAnswer(text=str(error), status=ToolStatus.timeout)
        except (PassingError, httpx.HTTPError, httpx.InvalidURL) as error:
            if _is_ours(error):
                raise
            return ToolAnswer(
                text=f"The page could not be read: {error}.", status=ToolStatus.user_error
            )
        budget = self._answer_tokens
        num_words = words_that_fit(text, self._codec, budget)
        part = await asyncio.to_thread(from_window, text, query, num_words)
        shown = trim(part, self._codec, budget) or NO_TEXT
        return ToolAnswer(text=shown, metrics={"cached": float(cached)})

    async def _text(self, address: str) -> tuple[str, bool]:
        url = str(self._rules.check(address))
        key = cache_key("browse", _FETCHER_VERSION, MAX_PAGE_BYTES, url)
        answer, cached = await self._asked.answer(key, lambda: self._fetch(url))
        kept = json.loads(answer)
        # The file may have been filled under other lists.
        for hop in kept["hops"]:
            self._rules.check(hop)
        return str(kept["text"]), cached

    async def _fetch(self, url: str) -> str:
        return await self._call.run(lambda: self._read(url))

    async def _read(self, url: str) -> str:
        page = await self._fetcher.fetch(url)
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._readers, page_text, page)
        return json.dumps({"hops": page.hops, "text": text})


def _is_ours(error: BaseException) -> bool:
    """True where the network, not the page, failed."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, socket.gaierror) or getattr(seen, "errno", None) in _OURS:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
