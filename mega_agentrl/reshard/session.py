"""Transfer sessions: the ranks of a plan connect through a TCP store.

All ranks of both sides join a session, trainer ranks first; the default process groups of Megatron
and vLLM are not touched. A session belongs to one plan. When the membership changes, the ranks of
the new plan join a new session, with another key at the same store.

A link has one session for all weights. Where engines merge adapters (`adapters`), it has a second
one for these; then the first carries the weights below them.

    rank 0     store = open_store(address, timeout_s)
               session = TransferSession(address=address, port=store.port, plan=plan, ...)
    any rank   executor = join_session(session, rank, layout, store=store if rank == 0 else None)

`join_session` returns when all ranks of the plan have joined.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.executor import TransferExecutor
from mega_agentrl.reshard.transports.registry import check_transport, join_transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import Hop, TransferPlan
    from mega_agentrl.reshard.topology import RankLocation


class TransferContent(StrEnum):
    """Parameters that a session transfers."""

    weights = "weights"
    adapters = "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSession:
    """Everything that a rank needs to take part in the transfers of a plan."""

    address: str
    """Host of the TCP store."""
    port: int
    """Port of the TCP store."""
    key: str
    """Key of the link, and with `content` the prefix of this session at the store."""
    plan: TransferPlan
    timeout_s: float
    """Deadline of every wait."""
    locations: tuple[RankLocation, ...] = ()
    """Locations of all ranks, from which transports are chosen; without any, all use gloo."""
    transport: TransportKind = TransportKind.auto
    """Transport of all hops, which it must connect; auto chooses one for each pair of ranks."""
    content: TransferContent = TransferContent.weights
    """Parameters that the plan transfers."""
    lora: LoraConfig | None = None
    """Adapters that the engines of the link merge; None if they get merged weights, or if there
    are none."""

    def __post_init__(self) -> None:
        check_transport(self.transport, self.locations, self.hops())

    @property
    def store_prefix(self) -> str:
        """Prefix of this session's keys at the store."""
        return f"{self.key}/{self.content}"

    def hops(self) -> set[Hop]:
        """Return the (source, target) pairs of the plan."""
        routes = {id(bucket.hops): bucket.hops for bucket in self.plan.buckets}
        return {hop for hops in routes.values() for hop in hops}

    def to_init_info(self, first_rank: int) -> dict[str, Any]:
        """Return the session as values that any serializer accepts.

        Args:
            first_rank: Rank of the engine's first worker.
        """
        return {"session": pickle.dumps(self), "first_rank": first_rank}

    @classmethod
    def from_bytes(cls, session: bytes) -> TransferSession:
        """Unpickle the session of `to_init_info`; only for bytes from our own driver."""
        restored: TransferSession = pickle.loads(session)
        return restored


class RanksNotJoinedError(RuntimeError):
    """The ranks of a session did not meet before the deadline."""

    def __init__(
        self, rank: int, missing_ranks: tuple[int, ...] | None, meeting: str, cause: str
    ) -> None:
        super().__init__(rank, missing_ranks, meeting, cause)
        self.rank = rank
        """Rank that raises."""
        self.missing_ranks = missing_ranks
        """Ranks that had not joined; None if the store does not answer."""
        self.meeting = meeting
        """How many ranks were to meet where, and in how many seconds."""
        self.cause = cause

    def __str__(self) -> str:
        """Return the message."""
        missing = "; the store did not answer"
        if self.missing_ranks is not None:
            names = ", ".join(map(str, self.missing_ranks))
            missing = f"; missing: rank {names}" if names else ""
        return (
            f"rank {self.rank} of the weight transfer: did not meet {self.meeting}{missing}: "
            f"{self.cause}"
        )


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Open a TCP store on a free port; the process that opens it must stay alive."""
    return TCPStore(
        address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join_session(
    session: TransferSession,
    rank: int,
    layout: Sequence[ShardLayout],
    *,
    store: TCPStore | None = None,
) -> TransferExecutor:
    """Wait for all ranks at the store, then connect to those that this one exchanges frames with.

    Args:
        session: The session to join.
        rank: Rank of this process in the plan.
        layout: Shards of this rank.
        store: The store, if this process has opened it.

    Raises:
        RanksNotJoinedError: If ranks are missing at the deadline.
        ValueError: If the plan was made from another layout, or locations from other ranks.
    """
    world_size = session.plan.world_size
    try:
        if store is None:
            timeout = timedelta(seconds=session.timeout_s)
            store = TCPStore(session.address, session.port, is_master=False, timeout=timeout)
        keyed_store = PrefixStore(session.store_prefix, store)
        keyed_store.set(f"joined/{rank}", "1")
        wait_for_all(keyed_store, world_size, session.timeout_s)
        transport = join_transport(
            keyed_store,
            rank,
            world_size,
            session.timeout_s,
            locations=session.locations,
            hops=session.hops(),
            chosen=session.transport,
        )
    except RuntimeError as error:
        meeting = (
            f"the {world_size} ranks at {session.address}:{session.port} within "
            f"{session.timeout_s:g} s"
        )
        missing_ranks = _missing_ranks(session, store)
        raise RanksNotJoinedError(rank, missing_ranks, meeting, str(error)) from error
    try:
        return TransferExecutor(session.plan, rank, transport, layout, session.timeout_s)
    except InputError as error:
        transport.close()
        name = f"rank {rank} of the weight transfer, {error.name}"
        raise InputError(name, error.got, error.expected, error.cause) from error


def wait_for_all(store: Store, num_ranks: int, timeout_s: float) -> None:
    """Return when all ranks have called this; a barrier that needs no connections between them.

    Args:
        store: A store with a prefix of its own for this barrier.
        num_ranks: Number of ranks.
        timeout_s: Deadline.

    Raises:
        RuntimeError: At the deadline, or if the store cannot be reached.
    """
    if store.add("num_arrived", 1) == num_ranks:
        store.set("all_arrived", "1")
    store.wait(["all_arrived"], timedelta(seconds=timeout_s))


def _missing_ranks(session: TransferSession, store: TCPStore | None) -> tuple[int, ...] | None:
    """Return the ranks that did not join; None if the store does not answer."""
    if store is None:
        return None
    keyed_store = PrefixStore(session.store_prefix, store)
    try:
        return tuple(
            r for r in range(session.plan.world_size) if not keyed_store.check([f"joined/{r}"])
        )
    except RuntimeError:
        return None
