"""Rules for pages that may be read: checks of the URL, the domain lists and the resolved addresses.

A URL must be http or https on its default port (80, 443), without user or password. Its host is a
name or an address in the usual spelling: other spellings of IPv4 addresses (decimal, octal,
hexadecimal, shortened) are refused, since parsers disagree about them. A domain in a list stands
for itself and all its subdomains; deny wins over allow; an empty allow list allows all.

A host is resolved once, and all of its addresses must be public, so that no name leads into the
private network: not loopback, private, shared, link-local, reserved, multicast or unspecified, nor
embedded in an IPv6 address (mapped, NAT64, 6to4, Teredo). The connection must use exactly the
checked addresses, since a name may resolve to another one a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TYPE_CHECKING

import httpx

from mega_agentrl.tool.base import ToolInputError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 2000

_HOST_NAME = re.compile(r"[a-z0-9._-]+")
_NUMERIC_LABEL = re.compile(r"(\d+|0[xX][0-9a-fA-F]*)")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_TUNNEL_NETWORKS = (ipaddress.IPv6Network("2001::/32"), ipaddress.IPv6Network("2002::/16"))
# Formally public, but served by the host or its cloud: Azure's host agent, 6to4 relays.
_NON_PUBLIC_NETWORKS = (
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv4Network("192.88.99.0/24"),
    ipaddress.IPv4Network("192.0.0.0/24"),
)


class RefusalReason(StrEnum):
    """Why a page is not read."""

    not_a_web_address = auto()
    spelling = auto()
    """The host is neither a name nor an address in the usual spelling."""
    domain = auto()
    """The domain lists do not allow it."""
    port = auto()
    no_address = auto()
    not_public = auto()
    redirect = auto()
    """The page redirects too often, or to a page that is refused."""
    status = auto()
    content = auto()
    """The content is no text, is packed in another way, or cannot be parsed."""


class PageRefusedError(ToolInputError):
    """The policy asked for a page that may not be read; the policy reads the text.

    Attributes:
        reason: why.
    """

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self._text = text

    def __str__(self) -> str:
        """Return the text."""
        return self._text


@dataclass(slots=True, kw_only=True, frozen=True)
class UrlRules:
    """The rules for URLs and their hosts."""

    allowed_domains: tuple[str, ...] = ()
    """Domains that may be read; empty for all."""
    denied_domains: tuple[str, ...] = ()
    """Domains that may not be read."""
    exempt_address: tuple[str, int] | None = None
    """An address and port that may be read although it is not public."""

    def check_url(self, text: str) -> httpx.URL:
        """Return the parsed URL; raises `PageRefusedError` if it may not be read."""
        if len(text) > MAX_URL_CHARS:
            raise PageRefusedError(
                RefusalReason.not_a_web_address,
                f"The address is longer than {MAX_URL_CHARS} characters.",
            )
        try:
            url = httpx.URL(text)
            port = url.port or DEFAULT_PORTS.get(url.scheme, 0)
            host = url.raw_host.decode("ascii").strip("[]").rstrip(".").lower()
        except (httpx.InvalidURL, ValueError) as error:
            raise PageRefusedError(
                RefusalReason.not_a_web_address, f"Not a web address: {error}."
            ) from error
        if url.scheme not in DEFAULT_PORTS or not host:
            raise PageRefusedError(
                RefusalReason.not_a_web_address,
                "Not a web address: expected http://... or https://...",
            )
        if url.userinfo:
            raise PageRefusedError(
                RefusalReason.not_a_web_address,
                "The address holds a user or a password, expected neither.",
            )
        _check_host_syntax(host)
        self._check_domain(host)
        if (host, port) != self.exempt_address and port != DEFAULT_PORTS[url.scheme]:
            text = f"Port {port} may not be read, expected {DEFAULT_PORTS[url.scheme]}."
            raise PageRefusedError(RefusalReason.port, text)
        return url.copy_with(fragment=None)

    def _check_domain(self, host: str) -> None:
        if any(is_same_or_subdomain(host, domain) for domain in self.denied_domains) or (
            self.allowed_domains
            and not any(is_same_or_subdomain(host, domain) for domain in self.allowed_domains)
        ):
            raise PageRefusedError(RefusalReason.domain, f"{host} may not be read.")

    async def resolve_public(self, url: httpx.URL, resolve: Resolver) -> tuple[str, ...]:
        """Return the addresses of a checked URL's host in the resolver's order.

        Raises:
            PageRefusedError: the host has no address, or an address that is not public.
            OSError: the resolver failed.
        """
        host = url.raw_host.decode("ascii").strip("[]")
        port = url.port or DEFAULT_PORTS[url.scheme]
        literal = _parse_ip(host)
        addresses = [str(literal)] if literal is not None else list(await resolve(host, port))
        if not addresses:
            raise PageRefusedError(RefusalReason.no_address, f"{host} has no address.")
        for address in addresses:
            if (address, port) == self.exempt_address:
                continue
            if not is_public_address(ipaddress.ip_address(address)):
                raise PageRefusedError(RefusalReason.not_public, f"{host} is not a public address.")
        return tuple(dict.fromkeys(addresses))


async def resolve_host(host: str, port: int) -> list[str]:
    """Resolve a host with the system's resolver; return no address if it has none."""
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    except UnicodeError:  # an invalid label
        return []
    return [str(row[4][0]) for row in rows]


def is_same_or_subdomain(host: str, domain: str) -> bool:
    """Return whether the host is the domain or, label by label, below it."""
    labels = host.lower().strip(".").split(".")
    suffix = domain.lower().strip(".").split(".")
    return labels[-len(suffix) :] == suffix


def is_public_address(address: IpAddress) -> bool:
    """Return whether the address belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None:
            return is_public_address(address.ipv4_mapped)
        if address in _NAT64:
            return is_public_address(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        # 6to4 and Teredo tunnel to other addresses.
        if address not in _GLOBAL_UNICAST or any(address in net for net in _TUNNEL_NETWORKS):
            return False
    elif any(address in network for network in _NON_PUBLIC_NETWORKS):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def _check_host_syntax(host: str) -> None:
    """Refuse a host that is neither a name nor an address in the usual spelling."""
    if _parse_ip(host) is not None:
        return
    if not _HOST_NAME.fullmatch(host):
        raise PageRefusedError(RefusalReason.spelling, f"{host} is not a host name.")
    if _NUMERIC_LABEL.fullmatch(host.rsplit(".", maxsplit=1)[-1]):
        raise PageRefusedError(
            RefusalReason.spelling, f"{host} is not an address in the usual spelling."
        )


def _parse_ip(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
