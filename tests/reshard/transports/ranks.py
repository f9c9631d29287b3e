"""Real processes with one transport each, driven from a test.

    with ranks(3) as group:
        group.start(0, send, [7, 8], [1])
        frames = group.ask(1, receive, 0, 2)

A job is a function of a module, called with the rank's `RankState`; what it raises comes back.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, TCPStore

from mega_agentrl.reshard.session import open_store
from tests.parallel.pool import fork_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADDRESS = "127.0.0.1"
ANSWER_S = 120.0
JOIN_S = 60.0
SLOT_BYTES = 100_000


@dataclass
class RankState:
    """What a rank's jobs share."""

    rank: int
    world_size: int
    transport: Any = None
    slots: list[torch.Tensor] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)

    def join(self, port: int, key: str, kind: Callable[..., Any]) -> None:
        """Make the transport. kind: called with (store, rank, world_size, timeout_s)."""
        store = PrefixStore(key, TCPStore(ADDRESS, port, is_master=False))
        self.transport = kind(store, self.rank, self.world_size, JOIN_S)
        self.slots = self.transport.allocate_slots(2, SLOT_BYTES)


class Group:
    """The processes, by rank."""

    def __init__(self, world_size: int) -> None:
        context = fork_server()
        self.store = open_store(ADDRESS, JOIN_S)
        self.processes, self._pipes = [], []
        for rank in range(world_size):
            ours, child_end = context.Pipe()
            process = context.Process(target=_run, args=(child_end, rank, world_size), daemon=True)
            process.start()
            child_end.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def start(self, rank: int, job: Callable[..., Any], *arguments: Any) -> None:
        """Give a rank something to do."""
        self._pipes[rank].send((job, arguments))

    def finish(self, rank: int) -> Any:
        """The result of what was started; raises what it raised."""
        assert self._pipes[rank].poll(ANSWER_S), f"rank {rank} hangs"
        result = self._pipes[rank].recv()
        if isinstance(result, Exception):
            raise result
        return result

    def ask(self, rank: int, job: Callable[..., Any], *arguments: Any) -> Any:
        """Both."""
        self.start(rank, job, *arguments)
        return self.finish(rank)

    def join(self, kind: Callable[..., Any], key: str = "link") -> None:
        """Give every rank a new transport."""
        everyone = range(len(self.processes))
        for rank in everyone:
            self.start(rank, RankState.join, self.store.port, key, kind)
        for rank in everyone:
            self.finish(rank)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(300)


@contextmanager
def ranks(world_size: int) -> Iterator[Group]:
    group = Group(world_size)
    try:
        yield group
    finally:
        for rank in range(world_size):
            group.kill(rank)


def _run(pipe: Any, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    rank_state = RankState(rank, world_size)
    while True:
        job, arguments = pipe.recv()
        try:
            pipe.send(job(rank_state, *arguments))
        except (RuntimeError, ValueError) as error:
            pipe.send(error)


def send(
    rank_state: RankState, values: list[int], peers: list[int], timeout_s: float = 300.0
) -> None:
    """Frames of 1,000 times `value` bytes that hold it, each to all peers, from two slots."""
    send_handles: list[list[Any]] = [[], []]
    for number, value in enumerate(values):
        for send_handle in send_handles[number % 2]:
            send_handle.wait(timeout_s)
        frame = rank_state.slots[number % 2][: 1000 * value].fill_(value)
        send_handles[number % 2] = [rank_state.transport.send(frame, peer) for peer in peers]
    for send_handle in send_handles[0] + send_handles[1]:
        send_handle.wait(timeout_s)


def receive(
    rank_state: RankState,
    peer: int,
    count: int,
    onward: tuple[int, ...] = (),
    timeout_s: float = 300.0,
) -> list[tuple[int, bool]]:
    """(first byte, whether all of the frame is as it must be) of each; passes them on."""
    found = []
    recv_handles = [rank_state.transport.receive(slot, peer) for slot in rank_state.slots[:count]]
    for number in range(count):
        recv_handle = recv_handles.pop(0)
        whole = recv_handle.wait(timeout_s)
        value = int(whole[0])
        frame = whole[: 1000 * value]
        send_handles = [rank_state.transport.send(frame, target) for target in onward]
        found.append((value, len(frame) == 1000 * value and bool((frame == value).all())))
        for send_handle in send_handles:
            send_handle.wait(timeout_s)
        recv_handle.release()
        if number + 2 < count:
            recv_handles.append(rank_state.transport.receive(rank_state.slots[number % 2], peer))
    return found


def wait_frame(rank_state: RankState, peer: int, timeout_s: float) -> tuple[str, float]:
    """Wait for a frame; what is raised, if anything, and after how long."""
    return timed_wait(rank_state.transport.receive(rank_state.slots[0][:1000], peer), timeout_s)


def wait_sent(rank_state: RankState, index: int, timeout_s: float) -> tuple[str, float]:
    """The same for a send handle in `saved`."""
    return timed_wait(rank_state.saved[index], timeout_s)


def timed_wait(handle: Any, timeout_s: float) -> tuple[str, float]:
    start_s, message = time.monotonic(), ""
    try:
        handle.wait(timeout_s)
    except RuntimeError as error:
        message = str(error)
    return message, time.monotonic() - start_s


def close(rank_state: RankState) -> None:
    rank_state.transport.close()
    rank_state.transport, rank_state.slots, rank_state.saved = None, [], []
