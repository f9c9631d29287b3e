"""Moves the messages of a plan between trainer ranks and rollout ranks, point to point.

All ranks, trainer ranks first and sinks after them, join one process group of their own over a
TCP store; the default group of neither side is touched, and no rank ever holds another rank's
shard. Every wait has the group's deadline.

    trainer rank r   store = open_store(address)            # rank 0 only; the others get its port
                     link = WeightLink(address, store.port, plan, timeout_s)
                     sender = ShardSender.join(link, rank=r, store=store or None)
                     sender.send(params, version)           # once per update
    sink s           receiver = ShardReceiver.join(link, sink=s)
                     for name, tensor in receiver.receive(version): ...

`join` returns when all ranks of the plan have joined. `send` and `receive` run concurrently.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from mega_agentrl.reshard.buckets import buffer_bytes, pack, unpack
from mega_agentrl.reshard.plan import Message, TransferPlan

_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class WeightLink:
    """All that a rank needs to take part."""

    address: str
    port: int
    plan: TransferPlan
    timeout_s: float
    first_sink: int = 0
    """Sink number of the first worker of the engine this link is for."""

    def to_plain(self) -> dict[str, Any]:
        """Values that any serializer takes."""
        return {"link": pickle.dumps(self)}

    @classmethod
    def from_plain(cls, link: bytes) -> WeightLink:
        """Undo `to_plain`; only for bytes from our own driver."""
        restored: WeightLink = pickle.loads(link)
        return restored


@dataclass(frozen=True, slots=True)
class SendReport:
    """num_bytes: sent by this rank to all sinks."""

    num_bytes: int
    seconds: float


def open_store(address: str, timeout_s: float) -> TCPStore:
    """The meeting point, on a free port; the process that opens it must stay alive."""
    return TCPStore(
        address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


class TransportGroup:
    """Point-to-point sends among the ranks of a plan."""

    def __init__(self, group: Any, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self._group = group
        self._timeout_s = timeout_s

    @classmethod
    def join(cls, link: WeightLink, rank: int, store: TCPStore | None = None) -> Self:
        """Meet all other ranks. store: the one this process has opened, if it has."""
        timeout = timedelta(seconds=link.timeout_s)
        world_size = link.plan.world_size
        try:
            if store is None:
                store = TCPStore(link.address, link.port, is_master=False, timeout=timeout)
            group = ProcessGroupGloo(
                PrefixStore("weights", store), rank, world_size, timeout=timeout
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} of the weight transfer: the {world_size} ranks did not meet at "
                f"{link.address}:{link.port} within {link.timeout_s:g} s: {error}"
            ) from error
        return cls(group, rank, link.timeout_s)

    def send(self, data: torch.Tensor, peer: int, message: Message) -> Any:
        """Start sending; returns the work to wait for."""
        with self._named("send to", peer, message):
            return self._group.send([data], peer, message.index)

    def receive(self, data: torch.Tensor, message: Message) -> Any:
        """Start receiving from the message's source; returns the work to wait for."""
        with self._named("receive from", message.source, message):
            return self._group.recv([data], message.source, message.index)

    def wait(self, work: Any, peer: int, message: Message, operation: str) -> None:
        """Wait until the deadline; an error names rank, peer, bucket and first tensor."""
        with self._named(operation, peer, message):
            work.wait(timedelta(seconds=self._timeout_s))

    @contextmanager
    def _named(self, operation: str, peer: int, message: Message) -> Iterator[None]:
        """Name who failed at what: a peer that is gone shows at the start or in the wait."""
        try:
            yield
        except RuntimeError as error:
            first = message.pieces[0].block.hf_name
            raise RuntimeError(
                f"weight transfer: rank {self.rank} could not {operation} rank {peer} in bucket "
                f"{message.index} (starts with {first}), deadline {self._timeout_s:g} s: {error}"
            ) from error

    def close(self) -> None:
        """Leave; peers that still wait fail at once."""
        self._group.abort()


class ShardSender:
    """Trainer side. Produces: this rank's messages. Waits for: the sinks that take them."""

    def __init__(self, plan: TransferPlan, group: TransportGroup) -> None:
        self._plan = plan
        self._group = group
        self._messages = [m for m in plan.messages if m.source == group.rank]
        self._dtype_of = {tensor.name: tensor.dtype for tensor in plan.tensors}

    @classmethod
    def join(cls, link: WeightLink, *, rank: int, store: TCPStore | None = None) -> Self:
        """Join the transport group as a trainer rank."""
        return cls(link.plan, TransportGroup.join(link, rank, store))

    def send(self, params: Mapping[str, torch.Tensor], version: int) -> SendReport:
        """Send this rank's part. params: its shards by the names in its layout."""
        start = time.perf_counter()
        pending: deque[tuple[Message, torch.Tensor, list[tuple[int, Any]]]] = deque()
        for message in self._messages:
            buffer = pack(message, params, self._dtype_of, version)
            works = [(sink, self._group.send(buffer, sink, message)) for sink in self._plan.sinks]
            pending.append((message, buffer, works))
            if len(pending) >= _IN_FLIGHT:
                self._finish(*pending.popleft())
        while pending:
            self._finish(*pending.popleft())
        num_bytes = sum(map(buffer_bytes, self._messages)) * self._plan.num_sinks
        return SendReport(num_bytes, time.perf_counter() - start)

    def _finish(self, message: Message, buffer: torch.Tensor, works: list[tuple[int, Any]]) -> None:
        # The buffer is an argument because it must live until the sends are done.
        for sink, work in works:
            self._group.wait(work, sink, message, "send to")

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class ShardReceiver:
    """Rollout side. Consumes: all messages of the plan, in its order."""

    def __init__(self, plan: TransferPlan, group: TransportGroup) -> None:
        self._plan = plan
        self._group = group
        self._tensor_of = {tensor.name: tensor for tensor in plan.tensors}
        self._dtype_of = {tensor.name: tensor.dtype for tensor in plan.tensors}

    @classmethod
    def join(cls, link: WeightLink, *, sink: int) -> Self:
        """Join the transport group as the given sink of the link's engine."""
        rank = link.plan.num_sources + link.first_sink + sink
        return cls(link.plan, TransportGroup.join(link, rank))

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face tensors in host memory, each as soon as its last block has come."""
        partial: dict[str, torch.Tensor] = {}
        missing = {name: torch.Size(t.shape).numel() for name, t in self._tensor_of.items()}
        for message, buffer in self._buffers():
            for piece, values in unpack(message, buffer, self._dtype_of, version):
                name, rect = piece.block.hf_name, piece.block.hf_rect
                if name not in partial:
                    tensor = self._tensor_of[name]
                    partial[name] = torch.empty(tensor.shape, dtype=values.dtype)
                partial[name][rect.slices] = values
                missing[name] -= rect.numel
                if not missing[name]:
                    yield name, partial.pop(name)
        assert not any(missing.values()), "a plan covers every element"

    def _buffers(self) -> Iterator[tuple[Message, torch.Tensor]]:
        """Messages in order; the next ones are already on their way."""
        waiting: deque[tuple[Message, torch.Tensor, Any]] = deque()
        upcoming = iter(self._plan.messages)
        while True:
            while len(waiting) < _IN_FLIGHT and (message := next(upcoming, None)) is not None:
                buffer = torch.empty(buffer_bytes(message), dtype=torch.uint8)
                waiting.append((message, buffer, self._group.receive(buffer, message)))
            if not waiting:
                return
            message, buffer, work = waiting.popleft()
            self._group.wait(work, message.source, message, "receive from")
            yield message, buffer

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
