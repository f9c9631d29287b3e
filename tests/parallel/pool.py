"""A pool of persistent rank processes that run one parallel layout after another over gloo.

    pool = RankPool(folder)
    results = pool.run(function, num_ranks, *arguments)   # one result per rank

`function(rank_info, *arguments)` runs on the first `num_ranks` processes at once. They look it up
by name, so it must be a top-level function of a module below `tests`. `rank_info` is a dict with
the fields of `actor.megatron_model.RankInfo`; every job has its own port. The function joins the
process group itself; groups that it leaves behind are destroyed before the next job.

If a rank raises, dies or exceeds the deadline, all processes are killed, because its peers may
wait for it in a collective. The error contains the rank's traceback, or the logs of all ranks
with the stack of each that hangs, and the next job starts new processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.runtime.free_port import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext, ForkServerProcess

START_DEADLINE_S = 300.0
COLLECTIVE_DEADLINE_S = 300.0
STACK_WAIT_S = 10.0
LOG_TAIL = 4000
LIBRARIES = [
    "torch",
    "safetensors.torch",
    "mega_agentrl.reshard.session",
    "tests.parallel.transfer_kernel",
]
ACTOR = ["mega_agentrl.actor.policy", "mega_agentrl.actor.critic"]
"""Modules that the server imports once (5 s); a fork then takes milliseconds."""
NO_POOL = "TESTS_WITHOUT_RANK_POOL"
"""Variable that `tests/conftest.py` sets where no collected test uses the pool."""


class RankError(RuntimeError):
    """A job "failed" on a rank, a rank "died", or ranks are "late".

    `details` has the traceback of the failure, or the end of each rank's log.
    """

    def __init__(self, job: str, reason: str, ranks: tuple[int, ...], details: str) -> None:
        super().__init__(f"{job}: {reason}: rank {', '.join(map(str, ranks))}\n{details}")
        self.reason = reason
        self.ranks = ranks
        self.details = details


@dataclass(frozen=True, slots=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection
    log: Path

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class RankPool:
    """Rank processes, as many as the largest job so far needed; `folder` is for their logs.

    The first one starts at once, so that no job waits until the server has imported the libraries.
    """

    def __init__(self, folder: Path, *, deadline_s: float = 300.0) -> None:
        self._folder = folder
        self.deadline_s = deadline_s
        self._ranks: list[_Rank] = []
        self._num_started = 0
        self._start(1)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are alive between jobs."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
        """Run `function(rank_info, *arguments)` on each rank; return the results by rank."""
        name = f"{function.__module__}:{function.__qualname__}"
        port = free_port()
        try:
            self._start(num_ranks - len(self._ranks))
            busy = self._ranks[:num_ranks]
            for number, rank in enumerate(busy):
                rank_info = {
                    "rank": number,
                    "world_size": num_ranks,
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "timeout_s": COLLECTIVE_DEADLINE_S,
                }
                rank.connection.send_bytes(packed((name, rank_info, arguments)))
            return _collect(name, busy, self.deadline_s)
        except BrokenPipeError as error:
            dead = tuple(n for n, r in enumerate(self._ranks) if not r.process.is_alive())
            logs = _logs(self._ranks)
            self.close()
            raise RankError(name, "died", dead, logs) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes; the next job starts new ones."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def _start(self, count: int) -> None:
        """Start `count` more processes and wait until they accept jobs."""
        if count <= 0:
            return
        for _ in range(count):
            log = self._folder / f"rank-{self._num_started}.log"
            self._num_started += 1
            self._ranks.append(_spawn(log))
        _collect("start", self._ranks[-count:], START_DEADLINE_S)


def _collect(name: str, busy: list[_Rank], deadline_s: float) -> list[Any]:
    """Collect one answer of each rank, in order."""
    ends_at = time.monotonic() + deadline_s
    results: dict[int, Any] = {}
    numbers = {rank.connection: number for number, rank in enumerate(busy)}
    while numbers:
        ready = wait(list(numbers), timeout=max(0.0, ends_at - time.monotonic()))
        if not ready:
            _ask_where(busy)
            raise RankError(name, "late", tuple(sorted(numbers.values())), _logs(busy))
        for connection in ready:
            number = numbers.pop(connection)
            try:
                failure, value = unpacked(connection.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise RankError(name, "died", (number,), _logs(busy)) from error
            if failure:
                raise RankError(name, "failed", (number,), failure)
            results[number] = value
    return [results[number] for number in range(len(busy))]


def fork_server() -> ForkServerContext:
    """Return the context to start rank processes with; a test run has one server.

    They are not forked from the tests' own process: that has threads.
    The actor is imported by each rank instead where no test of the run uses a `RankPool`, and on a
    machine with a GPU: a fork of a process that has touched the device cannot use it.
    """
    context = multiprocessing.get_context("forkserver")
    by_ranks = NO_POOL in os.environ or Path("/dev/nvidiactl").exists()
    context.set_forkserver_preload(LIBRARIES if by_ranks else LIBRARIES + ACTOR)
    return context


def packed(value: Any) -> bytes:
    """Any value with CPU tensors, by value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """What `packed` was given."""
    return torch.load(io.BytesIO(data), weights_only=False)


def _spawn(log: Path) -> _Rank:
    from tests.parallel.rank_process import serve

    log.touch()
    context = fork_server()
    here, there = context.Pipe()
    with there:
        process = context.Process(target=serve, args=(there, str(log)), daemon=True)
        process.start()
    return _Rank(process, here, log)


def _ask_where(ranks: list[_Rank]) -> None:
    """Have each process write its stack into its log, and wait until all have begun to."""
    sizes = {rank.log: rank.log.stat().st_size for rank in ranks if rank.process.is_alive()}
    for rank in ranks:
        if rank.log in sizes:
            os.kill(rank.process.pid, signal.SIGUSR1)
    ends_at = time.monotonic() + STACK_WAIT_S
    while any(log.stat().st_size == size for log, size in sizes.items()):
        if time.monotonic() > ends_at:
            return
        time.sleep(0.1)
    time.sleep(0.1)  # for the rest of the stacks


def _logs(ranks: list[_Rank]) -> str:
    return "\n".join(
        f"-- log of rank {number}\n{rank.log.read_text(errors='replace')[-LOG_TAIL:]}"
        for number, rank in enumerate(ranks)
    )
