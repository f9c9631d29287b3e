"""Fetches one page of the public web, every hop checked and connected to as it was checked.

Consumes a URL, produces the page it leads to. Waits for the resolver and for the servers, under
the caller's deadline. Redirects are followed by hand: each is checked like the first. The
connection goes to the very address that was checked, while Host, the name in the TLS handshake
and the certificate's name stay the URL's. Connections are not kept, cookies and proxies of the
environment not used. A page is read up to a size, packed and unpacked; the rest is left out.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from mega_agentrl.tool.browse_address import USUAL_PORTS, RefusedError, resolve_with_system
from mega_agentrl.tool.web_call import PassingError, StatusError, check_status, read_at_most

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from mega_agentrl.tool.browse_address import DomainRules, Resolve

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})

_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; mega_agentrl)",
    "Accept": "text/html, application/xhtml+xml, text/*;q=0.9, */*;q=0.1",
    "Accept-Encoding": "gzip, identity",
}
_READABLE = ("text/", "application/xhtml+xml", "application/xml", "application/json")
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass(slots=True, kw_only=True, frozen=True)
class Page:
    """What was read. hops: the URLs that were asked, the page's own last.

    media_type: without parameters, lower case. charset: as the server says, empty if it does not.
    """

    hops: tuple[str, ...]
    media_type: str
    charset: str
    body: bytes


class PageFetcher:
    """Fetches under the given rules. max_bytes: of a body. tls: who is trusted.

    timeout_s: of each wait for a server; a deadline over everything is the caller's.
    """

    def __init__(
        self,
        rules: DomainRules,
        *,
        max_bytes: int,
        timeout_s: float,
        resolve: Resolve = resolve_with_system,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._tls = tls or httpx.create_ssl_context(trust_env=False)

    async def fetch(self, text: str) -> Page:
        """The page at that URL.

        Raises `RefusedError` for what may not or cannot be read, `PassingError` for a failure
        that may pass, httpx's own errors of the transport, `OSError` of the resolver.
        """
        hops: list[str] = []
        url = self._rules.check(text)
        while len(hops) <= MAX_REDIRECTS:
            hops.append(str(url))
            response = await self._open(url)
            try:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    url = self._next(url, response.headers["location"])
                    continue
                return await self._read(response, tuple(hops))
            finally:
                await response.aclose()
        raise RefusedError(f"More than {MAX_REDIRECTS} redirects.")

    def _next(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            return self._rules.check(str(url.join(location)))
        except (httpx.InvalidURL, ValueError) as error:
            raise RefusedError(f"The page redirects elsewhere: {error}") from error

    async def _open(self, url: httpx.URL) -> httpx.Response:
        """The response, its body unread, from the first address that takes the connection."""
        addresses = await self._rules.addresses(url, self._resolve)
        for address in addresses[:-1]:
            try:
                return await self._ask(url, address)
            except httpx.ConnectError:
                continue
        return await self._ask(url, addresses[-1])

    async def _ask(self, url: httpx.URL, address: str) -> httpx.Response:
        host = url.raw_host.decode("ascii")
        # A connection of its own: a kept one could carry another name's certificate.
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
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
        response.stream = _Closing(response.stream, transport)
        response.request = request
        return response

    async def _read(self, response: httpx.Response, hops: tuple[str, ...]) -> Page:
        try:
            check_status(response, "The page")
        except StatusError as error:
            raise RefusedError(f"{error}.") from error
        declared = response.headers.get("content-type", "text/html")
        media_type = declared.partition(";")[0].strip().lower()
        if not media_type.startswith(_READABLE):
            raise RefusedError(f"The page is {media_type}, expected text.")
        packed = await read_at_most(response, self._max_bytes)
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        body = _unpack(packed, encoding, self._max_bytes)
        return Page(
            hops=hops,
            media_type=media_type,
            charset=response.charset_encoding or "",
            body=body,
        )


class _Closing(httpx.AsyncByteStream):
    """A body that closes the transport it came over."""

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
    shown = f"[{host}]" if ":" in host else host
    return shown if url.port in (None, USUAL_PORTS[url.scheme]) else f"{shown}:{url.port}"


def _unpack(packed: bytes, encoding: str, max_bytes: int) -> bytes:
    """At most `max_bytes` of what was packed; raises `PassingError` for a broken body."""
    if encoding in ("", "identity"):
        return packed[:max_bytes]
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RefusedError(f"The page is packed as {encoding}, which was not asked for.")
    try:
        return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(packed, max_bytes)
    except zlib.error as error:
        raise PassingError(f"the page's {encoding} is broken: {error}") from error
