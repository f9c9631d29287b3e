"""Connections of clients: how many may be open, and which one ends when there are too many.

A connection takes a descriptor, of which the run needs some itself: for sandboxes, files and
engines. The gateway therefore uses half of them at most. A connection belongs to the sandbox,
process or address that opened it, and once it has sent a request with a key, to the session. When
all are in use, the owner of the most loses one for a new connection, so that many connections of
one cannot keep the others out.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler

MAX_CONNECTIONS_PER_OWNER = 128
"""Connections of one sandbox or one session: twice the requests that a session may run at once."""

MAX_CONNECTIONS = 16_384
"""Connections of all owners, where the process has more than twice as many descriptors."""

MAX_DESCRIPTORS = 65_536
"""Descriptors that the process asks for. Programs that it starts inherit the limit, and some of
them do something for each descriptor that they could have."""

IDLE_TIMEOUT_S = 20.0
"""Time to send the head of a request, on a new connection or after the last answer. SDKs drop idle
connections after at most 15 s themselves, so that they do not run into it."""

CLOSE_DELAY_S = 1.0
"""Time after the end of a session in which its client may read answers, or use a connection for
another session."""

RETRY_DELAY_S = 0.1
"""Time until the next connection is accepted when the process has no descriptor left."""

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the peer of a Unix socket."""


class _Address(NamedTuple):
    """Owner of connections over TCP without a request, and of those that several sessions use."""

    host: str


class _Session(NamedTuple):
    """Owner of connections over TCP whose requests are of one session."""

    key: str


class _Container(NamedTuple):
    """Owner of connections over the Unix socket: a process, or all within one sandbox."""

    inode: int
    """Inode of the namespace of processes; 0 for the driver's own."""
    pid: int
    """The process; 0 for all of a namespace."""


_SHARED = _Address("")
"""Owner of connections that several sessions use."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    client: socket.socket
    owner: Hashable
    has_fixed_owner: bool
    """Whether the owner is known from the socket, so that no request changes it."""
    key: str | None = None
    """Key of the session whose requests it has sent."""
    running_key: str | None = None
    """Key of the session whose request it is waiting for."""
    transport: asyncio.Transport | None = None
    """The transport that reads and writes it; None until it is set up."""

    @property
    def has_closed(self) -> bool:
        """Whether its descriptor is closed; a connection that is closing may still have one."""
        return self.client.fileno() < 0

    def abort(self) -> None:
        """Close it now, whatever has not been sent."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """Accepts the connections of a server.

    Args:
        server: Serves a connection; of an `AppRunner` that has been set up.
        max_connections: Connections that may be open at once; None is half of the descriptors.
    """

    def __init__(self, server: web.Server, max_connections: int | None = None) -> None:
        self._server = server
        self.max_connections = max_connections or _half_of_descriptors()
        self._open: dict[RequestHandler, _Connection] = {}
        self._num_by_owner: Counter[Hashable] = Counter()
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_open(self) -> int:
        """Number of open connections; safe in any thread."""
        return sum(not connection.has_closed for connection in list(self._open.values()))

    def listen(self, address: tuple[str, int] | str) -> int:
        """Listen at a host and port, or the path of a Unix socket; return the port, or 0.

        Raises:
            OSError: the address cannot be used.
        """
        if isinstance(address, str):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen(_BACKLOG)
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._tasks.append(asyncio.create_task(self._accept(listener)))
        return 0 if isinstance(address, str) else int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stop to accept connections; safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._tasks, self._listeners = [], []

    @contextmanager
    def running(self, http: web.Request, key: str) -> Iterator[None]:
        """Note that a connection waits for the answer to a request of a session.

        Raises:
            GatewayError: the session has too many connections.
        """
        connection = self._open.get(http.protocol)
        if connection is None:  # it has been closed in the meantime
            raise ConnectionResetError
        self._assign(connection, key)
        connection.running_key = key
        try:
            yield
        finally:
            connection.running_key = None

    def close_session(self, key: str) -> None:
        """Close the connections of a session that has ended, in `CLOSE_DELAY_S`.

        A connection that another session uses stays open.
        """
        asyncio.get_running_loop().call_later(CLOSE_DELAY_S, self._close_owned, key)

    def _close_owned(self, key: str) -> None:
        for handler, connection in self._open.items():
            if connection.running_key == key:
                connection.abort()  # its client may not read, so that it would never be closed
            elif connection.key == key:
                handler.force_close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the client has gone away
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if client.family is not socket.AF_UNIX:  # asyncio does it for its own listeners only
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fixed_owner = _find_owner(client)
            owner = fixed_owner or _address_of(client)
            if not self._make_room(owner):
                client.close()
                continue
            connection = _Connection(
                client=client, owner=owner, has_fixed_owner=fixed_owner is not None
            )
            with suppress(OSError):  # the client has gone away
                make_handler = partial(self._make_handler, connection)
                transport, _ = await loop.connect_accepted_socket(make_handler, client)
                connection.transport = transport

    def _make_handler(self, connection: _Connection) -> RequestHandler:
        handler = self._server()
        self._open[handler] = connection
        self._num_by_owner[connection.owner] += 1
        return handler

    def _make_room(self, owner: Hashable) -> bool:
        """Return whether an owner may open a connection; another one may lose one for it."""
        is_full = len(self._open) >= self.max_connections
        if not is_full and self._num_by_owner.get(owner, 0) < MAX_CONNECTIONS_PER_OWNER:
            return True
        self._forget_closed()
        is_address = isinstance(owner, _Address)  # of many clients: only the total bounds them
        if self._num_by_owner.get(owner, 0) >= MAX_CONNECTIONS_PER_OWNER and not is_address:
            return False
        if len(self._open) >= self.max_connections:
            self._close_one()
        return True

    def _close_one(self) -> None:
        """Close the oldest connection of the owner of the most, an idle one if there is one."""
        (owner, _), *_ = self._num_by_owner.most_common(1)
        owned = [item for item in self._open.items() if item[1].owner == owner]
        idle = [item for item in owned if item[1].running_key is None]
        handler, connection = (idle or owned)[0]
        connection.abort()
        self._forget(handler)

    def _assign(self, connection: _Connection, key: str) -> None:
        """Make a connection one of a session, or of several."""
        if connection.key == key:
            return
        is_first = connection.key is None and connection.owner != _SHARED
        connection.key = key if is_first else None
        if connection.has_fixed_owner:
            return
        owner: Hashable = _Session(key) if is_first else _SHARED
        if is_first and self._num_by_owner.get(owner, 0) >= MAX_CONNECTIONS_PER_OWNER:
            self._forget_closed()
            if (count := self._num_by_owner.get(owner, 0)) >= MAX_CONNECTIONS_PER_OWNER:
                connection.key = None
                message = f"the session has {count} connections, the most that it may"
                raise GatewayError(ErrorKind.overloaded, message)
        self._num_by_owner[owner] += 1
        self._release(connection.owner)
        connection.owner = owner

    def _forget_closed(self) -> None:
        for handler in [handler for handler, item in self._open.items() if item.has_closed]:
            self._forget(handler)

    def _forget(self, handler: RequestHandler) -> None:
        self._release(self._open.pop(handler).owner)

    def _release(self, owner: Hashable) -> None:
        self._num_by_owner[owner] -= 1
        if not self._num_by_owner[owner]:
            del self._num_by_owner[owner]


def _find_owner(client: socket.socket) -> _Container | None:
    """Return who has opened a connection, if the socket tells it.

    Processes of a sandbox are one owner, whichever of them connects. Connections of processes that
    have ended since are one owner, too: a client could end a process for each.
    """
    if client.family is not socket.AF_UNIX:
        return None
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    if pid == os.getpid():
        return None
    try:
        inode = os.stat(f"/proc/{pid}/ns/pid").st_ino
    except FileNotFoundError:
        return _Container(0, 0)
    except OSError:  # the process is not ours
        return _Container(0, pid)
    if inode == os.stat("/proc/self/ns/pid").st_ino:
        return _Container(0, pid)
    return _Container(inode, 0)


def _address_of(client: socket.socket) -> _Address:
    if client.family is socket.AF_UNIX:
        return _Address("unix")
    try:
        return _Address(str(client.getpeername()[0]))
    except OSError:  # it has gone away
        return _Address("")


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors as far as it may itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_DESCRIPTORS), hard))


def _half_of_descriptors() -> int:
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
