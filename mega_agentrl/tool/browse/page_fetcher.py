"""Fetches one page of the public web; every redirect is checked like the first URL.

Redirects are followed one at a time, each after a check. A connection goes to exactly the address
that was checked, while the Host header, the name in the TLS handshake and the name in the
certificate stay those of the URL. Connections are not reused; cookies and proxies of the
environment are not used. A page is read up to a size limit, compressed and decompressed; the rest
is dropped.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from mega_agentrl.tool.browse.url_rules import (
    DEFAULT_PORTS,
    PageRefusedError,
    RefusalReason,
    resolve_host,
)
from mega_agentrl.tool.web.retry import HttpStatusError, TransientError, raise_for_status, read_body

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from mega_agentrl.tool.browse.url_rules import RefusalReason, Resolver, UrlRules

MAX_REDIRECTS = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})

_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; mega_agentrl)",
    "Accept": "text/html, application/xhtml+xml, text/*;q=0.9, */*;q=0.1",
    "Accept-Encoding": "gzip, identity",
}
_TEXT_MEDIA_TYPES = ("text/", "application/xhtml+xml", "application/xml", "application/json")
_ZLIB_AUTO_WBITS = 32 + zlib.MAX_WBITS


@dataclass(slots=True, kw_only=True, frozen=True)
class Page:
    """A fetched page."""

    url_chain: tuple[str, ...]
    """The requested URLs, the page's own last."""
    media_type: str
    """Lower case, without parameters."""
    charset: str
    """Character set that the server declares; empty if it declares none."""
    body: bytes
    """Decompressed content."""


class PageFetcher:
    """Fetches pages under the given rules.

    Args:
        rules: which URLs may be read.
        max_bytes: limit of a body.
        timeout_s: limit of each wait for a server; a total deadline is up to the caller.
        resolve: resolves host names.
        ssl_context: trusted certificates; None for the default ones.
    """

    def __init__(
        self,
        rules: UrlRules,
        *,
        max_bytes: int,
        timeout_s: float,
        resolve: Resolver = resolve_host,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._ssl_context = ssl_context or httpx.create_ssl_context(trust_env=False)

    async def fetch(self, text: str) -> Page:
        """Return the page at a URL.

        Raises:
            PageRefusedError: the page may not or cannot be read.
            TransientError: a failure that a retry may resolve.
            httpx.HTTPError: an error of the transport.
            OSError: an error of the resolver.
        """
        url_chain: list[str] = []
        url = self._rules.check_url(text)
        while len(url_chain) <= MAX_REDIRECTS:
            url_chain.append(str(url))
            response = await self._send_to_first_reachable(url)
            try:
                if response.status_code in REDIRECT_STATUSES and "location" in response.headers:
                    url = self._redirect_target(url, response.headers["location"])
                    continue
                return await self._read_page(response, tuple(url_chain))
            finally:
                await response.aclose()
        raise PageRefusedError(RefusalReason.redirect, f"More than {MAX_REDIRECTS} redirects.")

    def _redirect_target(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            return self._rules.check_url(str(url.join(location)))
        except (httpx.InvalidURL, ValueError) as error:
            raise PageRefusedError(
                RefusalReason.redirect, f"The page redirects elsewhere: {error}"
            ) from error

    async def _send_to_first_reachable(self, url: httpx.URL) -> httpx.Response:
        """Return the unread response of the first address that accepts a connection."""
        addresses = await self._rules.resolve_public(url, self._resolve)
        for address in addresses[:-1]:
            try:
                return await self._send_to_address(url, address)
            except httpx.ConnectError:
                continue
        return await self._send_to_address(url, addresses[-1])

    async def _send_to_address(self, url: httpx.URL, address: str) -> httpx.Response:
        host = url.raw_host.decode("ascii")
        # A new connection: a reused one could belong to another name's certificate.
        transport = httpx.AsyncHTTPTransport(verify=self._ssl_context, trust_env=False)
        request = httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={**_HEADERS, "Host": _host_header(url, host)},
            extensions={
                "sni_hostname": host.rstrip("."),
                "timeout": httpx.Timeout(self._timeout_s).as_dict(),
            },
        )
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await transport.aclose()
            raise
        response.stream = _TransportClosingStream(response.stream, transport)
        response.request = request
        return response

    async def _read_page(self, response: httpx.Response, url_chain: tuple[str, ...]) -> Page:
        try:
            raise_for_status(response, "The page")
        except HttpStatusError as error:
            raise PageRefusedError(RefusalReason.status, f"{error}.") from error
        content_type = response.headers.get("content-type", "text/html")
        media_type = content_type.partition(";")[0].strip().lower()
        if not media_type.startswith(_TEXT_MEDIA_TYPES):
            raise PageRefusedError(
                RefusalReason.content, f"The page is {media_type}, expected text."
            )
        compressed = await read_body(response, self._max_bytes)
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        body = _decompress(compressed, encoding, self._max_bytes)
        return Page(
            url_chain=url_chain,
            media_type=media_type,
            charset=response.charset_encoding or "",
            body=body,
        )


class _TransportClosingStream(httpx.AsyncByteStream):
    """A response body that closes its transport when it is closed."""

    def __init__(self, body: object, transport: httpx.AsyncHTTPTransport) -> None:
        assert isinstance(body, httpx.AsyncByteStream)
        self._body = body
        self._transport = transport

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            await self._transport.aclose()


def _host_header(url: httpx.URL, host: str) -> str:
    bracketed_host = f"[{host}]" if ":" in host else host
    return (
        bracketed_host
        if url.port in (None, DEFAULT_PORTS[url.scheme])
        else f"{bracketed_host}:{url.port}"
    )


def _decompress(compressed: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return at most `max_bytes` of the content; raises `TransientError` for a broken body."""
    if encoding in ("", "identity"):
        return compressed[:max_bytes]
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise PageRefusedError(
            RefusalReason.content, f"The page is packed as {encoding}, which was not asked for."
        )
    try:
        return zlib.decompressobj(_ZLIB_AUTO_WBITS).decompress(compressed, max_bytes)
    except zlib.error as error:
        raise TransientError(f"the page's {encoding} is broken: {error}") from error
