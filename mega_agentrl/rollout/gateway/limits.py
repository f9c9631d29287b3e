"""Bounds of what clients can make the gateway hold, and what it holds at the moment.

Two things grow with what clients send: bytes in flight, which are bodies that are being received,
read and encoded, and bytes held, which are the messages, images and tokens of the sessions' trees.
Each has a bound per session and one for all sessions together. When the latter is reached, a
session may still have its equal share of it, so that sessions that hold much cannot keep out those
that hold little.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.estimate.memory_limits import MemoryLimits
from mega_agentrl.rollout.gateway.work_threads import WorkThreads

if TYPE_CHECKING:
    from collections.abc import Hashable

_MIB = 1 << 20

MAX_IN_FLIGHT_BYTES = 512 * _MIB
"""Bytes in flight of all sessions: eight bodies of the default maximum size. Reading a body takes
up to three times its bytes, so that this is at most 1.5 GiB of memory."""

MAX_HELD_BYTES = 512 * _MIB
"""Bytes held per session: 100 screenshots of 3 MiB, and about 100 contexts of 32,768 tokens."""

_HELD_SHARE_OF_MEMORY = 0.25
"""Share of the memory of the machine or container that all sessions may hold. The rest is for the
run: the object store of Ray alone takes 30 %."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GatewayUsage:
    """The use of the gateway's resources at the moment, and their bounds (`Gateway.usage`)."""

    num_sessions: int
    """Open sessions."""
    max_sessions: int
    """Sessions that may be open: `rollout.agent.gateway.max_sessions`."""
    num_connections: int
    """Open connections, idle ones included. Each has a descriptor."""
    max_connections: int
    """Connections that may be open: half of the process's descriptors."""
    bytes_in_flight: int
    """Bytes of bodies that are being received, read and encoded."""
    max_bytes_in_flight: int
    bytes_held: int
    """Bytes of messages, images and tokens in the trees of all open sessions, estimated."""
    max_bytes_held: int
    most_bytes_held: int
    """Bytes that the largest of the open sessions holds."""
    max_bytes_held_per_session: int


class ByteBudget:
    """Bytes that owners hold, with a bound for each owner and one for all together.

    Args:
        max_per_owner: Bytes that one owner may hold.
        max_total: Bytes that all may hold. An owner that holds at most its equal share of them may
            always take more, so that the sum is at most twice the bound.
    """

    def __init__(self, max_per_owner: int, max_total: int) -> None:
        self.max_per_owner = max_per_owner
        self.max_total = max_total
        self.total = 0
        """Bytes that all owners hold."""
        self._by_owner: dict[Hashable, int] = {}
        self._waiters: set[asyncio.Event] = set()

    @property
    def most(self) -> int:
        """Bytes that the largest owner holds."""
        return max(self._by_owner.values(), default=0)

    def held_by(self, owner: Hashable) -> int:
        """Return the bytes that an owner holds."""
        return self._by_owner.get(owner, 0)

    def take(self, owner: Hashable, num_bytes: int) -> bool:
        """Add bytes to those of an owner; return False, and add none, if that is too many."""
        held = self.held_by(owner) + num_bytes
        num_owners = len(self._by_owner) + (owner not in self._by_owner)
        if held > self.max_per_owner:
            return False
        if self.total + num_bytes > self.max_total and held > self.max_total // num_owners:
            return False
        self.add(owner, num_bytes)
        return True

    async def acquire(self, owner: Hashable, num_bytes: int) -> None:
        """Add bytes to those of an owner; waits for `give_back` while that is too many."""
        while not self.take(owner, num_bytes):
            given_back = asyncio.Event()
            self._waiters.add(given_back)
            try:
                await given_back.wait()
            finally:
                self._waiters.discard(given_back)

    def add(self, owner: Hashable, num_bytes: int) -> None:
        """Add bytes to those of an owner that it cannot be refused."""
        self._by_owner[owner] = self.held_by(owner) + num_bytes
        self.total += num_bytes

    def give_back(self, owner: Hashable, num_bytes: int | None = None) -> None:
        """Remove bytes of an owner; None removes all."""
        held = self.held_by(owner)
        num_bytes = held if num_bytes is None else num_bytes
        self.total -= num_bytes
        if held > num_bytes:
            self._by_owner[owner] = held - num_bytes
        else:
            self._by_owner.pop(owner, None)
        for waiter in self._waiters:
            waiter.set()


@dataclass(slots=True, kw_only=True, frozen=True)
class SharedResources:
    """The threads and the budget that all sessions of a gateway share."""

    threads: WorkThreads = field(default_factory=WorkThreads)
    held: ByteBudget = field(default_factory=lambda: held_budget())


def in_flight_budget(max_body_bytes: int) -> ByteBudget:
    """Return the budget of bytes in flight: two bodies of the maximum size per session."""
    return ByteBudget(2 * max_body_bytes, max(MAX_IN_FLIGHT_BYTES, 2 * max_body_bytes))


def held_budget() -> ByteBudget:
    """Return the budget of bytes held, whose total depends on the memory of the container."""
    total = int(_HELD_SHARE_OF_MEMORY * MemoryLimits().smallest_bytes())
    return ByteBudget(MAX_HELD_BYTES, max(MAX_HELD_BYTES, total))
