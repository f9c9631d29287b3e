"""Joining of a transfer session by many processes, against a gloo group of all of them."""

from __future__ import annotations

import gc
import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice, TransferPlan
from mega_agentrl.reshard.session import TransferSession, join_session, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

ADDRESS = "127.0.0.1"
TIMEOUT_S = 900.0
NUM_SOURCES = 4
"""Trainer ranks that send to a rollout rank."""
_LIBRARIES = ["torch", "mega_agentrl.reshard.session", __name__]
_ROW_BYTES = 16


class JoinCost(NamedTuple):
    """Seconds and connections until all ranks are connected."""

    wall_s: float
    num_connections: int
    """Connections between two ranks."""


def measure_join(num_ranks: int) -> dict[str, JoinCost]:
    """Return the costs of "session" and "mesh", with two trainer ranks for each rollout rank."""
    plan, layout = make_plan(num_ranks - num_ranks // 3, num_ranks // 3)
    with _start_ranks(num_ranks, layout) as (port, pipes):
        session = TransferSession(
            address=ADDRESS, port=port, key="first", plan=plan, timeout_s=TIMEOUT_S
        )
        _measure(pipes, "session", session)  # a process touches its own pages
        return {
            "session": _measure(pipes, "session", replace(session, key="second")),
            "mesh": _measure(pipes, "mesh", num_ranks),
        }


def make_plan(num_trainer_ranks: int, num_rollout_ranks: int) -> tuple[TransferPlan, ShardLayout]:
    """Return a plan in which each rollout rank has `NUM_SOURCES` sources, and every rank's shard.

    Each bucket is one row of the only tensor.
    """
    pairs = [
        ((target * NUM_SOURCES + number) % num_trainer_ranks, num_trainer_ranks + target)
        for target in range(num_rollout_ranks)
        for number in range(min(NUM_SOURCES, num_trainer_ranks))
    ]
    columns = _ROW_BYTES // 4
    buckets = tuple(
        Bucket(
            row,
            _ROW_BYTES,
            (TensorSlice("w", Rect((row, 0), (row + 1, columns)), _ROW_BYTES),),
            (Hop(*pair),),
        )
        for row, pair in enumerate(pairs)
    )
    shape = (len(pairs), columns)
    whole = Rect((0, 0), shape)
    plan = TransferPlan(num_trainer_ranks, num_rollout_ranks, {"w": "float32"}, buckets)
    return plan, ShardLayout("w", shape, (Block("w", whole, whole),))


def _measure(pipes: list[Connection], kind: str, argument: Any) -> JoinCost:
    start_s = time.perf_counter()
    for pipe in pipes:
        pipe.send((kind, argument))
    num_sockets = [_answer_of(pipe) for pipe in pipes]
    wall_s = time.perf_counter() - start_s
    return JoinCost(wall_s, sum(num_sockets) // 2)


@contextmanager
def _start_ranks(num_ranks: int, layout: ShardLayout) -> Iterator[tuple[int, list[Connection]]]:
    """Fork processes that are connected to one store; yield its port and a pipe to each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    store = open_store(ADDRESS, TIMEOUT_S)
    pipes, processes = [], []
    try:
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_run_rank, args=(there, rank, store.port, layout), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            _answer_of(pipe)
        yield store.port, pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _answer_of(pipe: Connection) -> int:
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return int(answer)


def _run_rank(pipe: Connection, rank: int, port: int, layout: ShardLayout) -> None:
    gc.disable()  # a collection would copy the pages of all objects that were imported before
    torch.set_num_threads(1)
    store = TCPStore(ADDRESS, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    pipe.send(0)
    kept = []  # what is connected
    while True:
        kind, argument = pipe.recv()
        before = established_connections()
        try:
            if kind == "session":
                kept.append(join_session(argument, rank, [layout], store=store))
            else:
                timeout = timedelta(seconds=TIMEOUT_S)
                kept.append(ProcessGroupGloo(PrefixStore(kind, store), rank, argument, timeout))
            pipe.send(len(established_connections() - before))
        except RuntimeError as error:
            pipe.send(error)


def established_connections() -> set[str]:
    """Return the inodes of this process's ends of established TCP connections."""
    sockets = {
        link.removeprefix("socket:[").removesuffix("]")
        for link in map(_read_link, Path("/proc/self/fd").iterdir())
    }
    tables = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[3] == _ESTABLISHED} & sockets


_ESTABLISHED = "01"
"""State of a connection in /proc/net/tcp."""


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
