"""Which pages may be read: the URL as it is written, the domain lists, the addresses behind it.

A URL is http or https on its usual port (80, 443), without user or password. Its host is a name
or an address in the usual spelling: other spellings of IPv4 addresses (decimal, octal,
hexadecimal, shortened) are refused, since every reader takes them for another one. A domain in a
list stands for itself and all below it; deny wins over allow; an empty allow list allows all.

A host is resolved once, and every address it has must be public, so that no name leads into the
private network: not loopback, private, shared, link-local, reserved, multicast or unspecified,
also not inside an IPv6 address (mapped, NAT64, 6to4, Teredo). Whoever connects must take exactly
the addresses that were checked: a name may mean another one a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

USUAL_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 2000

_NAME = re.compile(r"[a-z0-9._-]+")
_NUMERIC_LABEL = re.compile(r"(\d+|0[xX][0-9a-fA-F]*)")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_EMBEDDED_IN = (ipaddress.IPv6Network("2001::/32"), ipaddress.IPv6Network("2002::/16"))
# Public by their number, but served by the host or its cloud: Azure's, and 6to4's relays.
_NOT_PUBLIC = (
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv4Network("192.88.99.0/24"),
    ipaddress.IPv4Network("192.0.0.0/24"),
)


class RefusedError(ValueError):
    """The policy asked for a page that may not be read."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DomainRules:
    """Which hosts may be read. admit: an address and port that is let through all the same."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    admit: tuple[str, int] | None = None

    def check(self, text: str) -> httpx.URL:
        """The URL, if it may be read as far as can be told from it; raises `RefusedError`."""
        if len(text) > MAX_URL_CHARS:
            raise RefusedError(f"The address is longer than {MAX_URL_CHARS} characters.")
        try:
            url = httpx.URL(text)
            port = url.port or USUAL_PORTS.get(url.scheme, 0)
            host = url.raw_host.decode("ascii").strip("[]").rstrip(".").lower()
        except (httpx.InvalidURL, ValueError) as error:
            raise RefusedError(f"Not a web address: {error}.") from error
        if url.scheme not in USUAL_PORTS or not host:
            raise RefusedError("Not a web address: expected http://... or https://...")
        if url.userinfo:
            raise RefusedError("The address holds a user or a password, expected neither.")
        _check_spelling(host)
        self._check_domain(host)
        if (host, port) != self.admit and port != USUAL_PORTS[url.scheme]:
            raise RefusedError(f"Port {port} may not be read, expected {USUAL_PORTS[url.scheme]}.")
        return url.copy_with(fragment=None)

    def _check_domain(self, host: str) -> None:
        if any(is_below(host, domain) for domain in self.deny) or (
            self.allow and not any(is_below(host, domain) for domain in self.allow)
        ):
            raise RefusedError(f"{host} may not be read.")

    async def addresses(self, url: httpx.URL, resolve: Resolve) -> tuple[str, ...]:
        """The addresses of a checked URL's host, each of them public, in the order they came.

        Raises `RefusedError`, also for a host without an address; `OSError` where the names
        cannot be asked for now.
        """
        host = url.raw_host.decode("ascii").strip("[]")
        port = url.port or USUAL_PORTS[url.scheme]
        literal = _literal(host)
        found = [str(literal)] if literal is not None else list(await resolve(host, port))
        if not found:
            raise RefusedError(f"{host} has no address.")
        for address in found:
            if (address, port) == self.admit:
                continue
            if not is_public(ipaddress.ip_address(address)):
                raise RefusedError(f"{host} is not a public address.")
        return tuple(dict.fromkeys(found))


async def resolve_with_system(host: str, port: int) -> list[str]:
    """Addresses of a host by the system's resolver; empty where it has none."""
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    except UnicodeError:  # a label that no name may have
        return []
    return [str(row[4][0]) for row in rows]


def is_below(host: str, domain: str) -> bool:
    """True where the host is the domain or, label by label, below it."""
    labels = host.lower().strip(".").split(".")
    suffix = domain.lower().strip(".").split(".")
    return labels[-len(suffix) :] == suffix


def is_public(address: Address) -> bool:
    """True for an address of the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        # What 6to4 and Teredo tunnel to is nobody's page.
        if address not in _GLOBAL_UNICAST or any(address in net for net in _EMBEDDED_IN):
            return False
    elif any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def _check_spelling(host: str) -> None:
    """Refuse a host that is neither an address in the usual spelling nor a name."""
    if _literal(host) is not None:
        return
    if not _NAME.fullmatch(host):
        raise RefusedError(f"{host} is no name of a host.")
    if _NUMERIC_LABEL.fullmatch(host.rsplit(".", maxsplit=1)[-1]):
        raise RefusedError(f"{host} is no address in the usual spelling.")


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
