"""Trainer ranks without Megatron, in real processes, that hold shards of a model folder.

trainer = FakeTrainer(folder, tensor=2, pipeline=2)
session = trainer.connect(rollout_layouts)   # the rollout ranks join the session
trainer.wait_joined()
trainer.send(folder, version)                # every rank sends; the rollout ranks receive
digest_of = trainer.digests()                # of every region, or raises what a rank raised
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.session import TransferSession, join_session, open_store
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    SourceDigests,
    collect_regions,
)
from tests.parallel.pool import fork_server
from tests.reshard.faults import TOLD_FAULTS, Fault, Hit, cut, inject, told_hit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion

ADDRESS = "127.0.0.1"
DEADLINE_S = 300.0


def source_layouts(folder: Path, tensor: int, pipeline: int) -> list[list[ShardLayout]]:
    """Layouts of all trainer ranks, tensor ranks first."""
    shape = ModelShape.from_folder(folder)
    return [
        megatron_layout(
            shape,
            ModelParallelRank(
                tensor_rank=rank % tensor,
                tensor_size=tensor,
                pipeline_rank=rank // tensor,
                pipeline_size=pipeline,
            ),
        )
        for rank in range(tensor * pipeline)
    ]


class FakeTrainer:
    """All trainer ranks and their driver."""

    def __init__(
        self,
        folder: Path,
        *,
        tensor: int = 2,
        pipeline: int = 2,
        timeout_s: float = 300.0,
        dtype: str = "float32",
    ) -> None:
        self.hit: Hit | None = None
        """What the last fault has hit; not known of one that ends its process."""
        self._cut = (tensor, pipeline)
        self._timeout_s = timeout_s
        self._num_links = self._num_orders = 0
        self._verifier: DigestVerifier | None = None
        self.use(folder, dtype)
        self.processes: list[Any] = [None] * len(self.layouts)
        self._pipes: list[Any] = [None] * len(self.layouts)
        for rank in range(len(self.layouts)):
            self._start(rank)
        self._wait_ready()

    def use(self, folder: Path, dtype: str = "float32") -> None:
        """Have the model of a folder, sent in a dtype, from the next session on."""
        self.dtype = dtype
        self.layouts = source_layouts(folder, *self._cut)
        self.names = list(hf_shapes(ModelShape.from_folder(folder)))

    def plan(self, rollout_layouts: Sequence[Sequence[ShardLayout]], bucket_bytes: int) -> Any:
        """Of a transfer to rollout ranks on the same machine."""
        locations = [RankLocation(0)] * (len(self.layouts) + len(rollout_layouts))
        return plan_transfer(
            self.layouts,
            rollout_layouts,
            locations,
            self.dtype,
            names=self.names,
            bucket_bytes=bucket_bytes,
        )

    def connect(
        self,
        rollout_layouts: Sequence[Sequence[ShardLayout]],
        *,
        bucket_bytes: int = 20_000,
        fault: Fault | None = None,
        away: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> TransferSession:
        """Let every rank join a new session; returns it at once, for the rollout ranks.

        away: ranks that do not join. timeout_s: another deadline than the usual one.
        """
        plan = self.plan(rollout_layouts, bucket_bytes)
        self.regions: list[DigestRegion] = collect_regions(rollout_layouts)
        self._verifier = DigestVerifier(self.layouts, self.regions)
        self._num_links += 1
        session = TransferSession(
            address=ADDRESS,
            port=self._port,
            key=f"link-{self._num_links}",
            plan=plan,
            timeout_s=timeout_s or self._timeout_s,
        )
        self._order("join", session, self.regions, self.layouts, fault, away=away)
        return session

    def wait_joined(self) -> None:
        """Until all ranks have joined; raises what one of them raised."""
        self._collect()

    def wait_at_store(self, session: TransferSession) -> None:
        """Wait until the ranks that were told to join are at the store, where others name them."""
        timeout = timedelta(seconds=DEADLINE_S)
        store = TCPStore(session.address, session.port, is_master=False, timeout=timeout)
        PrefixStore(session.store_prefix, store).wait([f"joined/{rank}" for rank in self._waiting])

    def send(self, folder: Path, version: int, *, fault: Fault | None = None) -> None:
        """Start sending the weights of a folder."""
        self.hit = None
        self._order("send", str(folder), version, fault)

    def results(self) -> list[Any]:
        """What every rank has to say of the last order: a value, or the error it raised."""
        return self._collect(raising=False)

    def digests(self) -> dict[DigestRegion, tuple[int, int]]:
        """Of every region, after `send`."""
        return self.expected_digests(self._collect())

    def expected_digests(self, rank_digests: Sequence[Any]) -> dict[DigestRegion, tuple[int, int]]:
        """The same from the `results` of a `send`."""
        assert self._verifier is not None, "connect() comes first"
        digests = self._verifier.expected_digests(rank_digests)
        pairs = ((int(one), int(two)) for one, two in digests)
        return dict(zip(self.regions, pairs, strict=True))

    def kill(self, rank: int) -> None:
        """End a rank's process."""
        self.processes[rank].kill()
        self.processes[rank].join(300)

    def revive(self) -> list[int]:
        """Start the ranks again whose processes are gone; the old sessions are of no use then."""
        gone = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
        for rank in gone:
            self._start(rank)
        if gone:
            self._wait_ready()
        return gone

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(300)

    def _start(self, rank: int) -> None:
        context = fork_server()
        self._pipes[rank], child_end = context.Pipe()
        self.processes[rank] = context.Process(
            target=_run_rank, args=(rank, child_end), daemon=True
        )
        self.processes[rank].start()
        child_end.close()  # so that the end of the process ends the pipe

    def _wait_ready(self) -> None:
        """Until all processes are up, and the store."""
        self._order("open_store", self._timeout_s)
        self._port = self._collect()[0]

    def _order(self, order: str, *arguments: Any, away: Sequence[int] = ()) -> None:
        self._num_orders += 1
        self._waiting = [rank for rank in range(len(self._pipes)) if rank not in away]
        for rank in self._waiting:
            if self.processes[rank].is_alive():
                self._pipes[rank].send((self._num_orders, order, *arguments))

    def _collect(self, *, raising: bool = True) -> list[Any]:
        answers: dict[int, Any] = {}
        end_s = time.monotonic() + DEADLINE_S
        while waiting := [rank for rank in self._waiting if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in waiting], end_s - time.monotonic())
            if not ready:
                raise AssertionError(f"trainer ranks {waiting} hang")
            for rank in waiting:
                if self._pipes[rank] in ready:
                    answers |= self._answer(rank)
        errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
        for error in errors:
            if raising or isinstance(error, AssertionError):
                raise error
        return [answers[rank] for rank in sorted(answers)]

    def _answer(self, rank: int) -> dict[int, Any]:
        """What a rank says of the last order; nothing if it still speaks of an earlier one."""
        try:
            number, answer, hit = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return {rank: RuntimeError(f"the process of trainer rank {rank} is gone")}
        if number != self._num_orders:
            return {}
        self.hit = hit or self.hit
        return {rank: answer}


def _run_rank(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    one = _Rank(rank)
    while True:
        number, order, *arguments = pipe.recv()
        one.hit = None
        try:
            answer = getattr(one, order)(*arguments)
        except (RuntimeError, ValueError) as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a bug of the test, not of a transfer
            answer = AssertionError(f"{type(error).__name__}: {error}")
        pipe.send((number, answer, one.hit))


class _Rank:
    """What one process holds; its methods are the orders."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = None
        self._executor: Any = None
        self._reported: Any = None
        self._last_sent: dict[Any, Any] = {}
        """Tensors last sent of each model."""
        self.hit: Hit | None = None

    def open_store(self, timeout_s: float) -> int | None:
        """Rank 0 opens the store, once."""
        if self._rank == 0 and self._store is None:
            self._store = open_store(ADDRESS, timeout_s)
        return self._store.port if self._store else None

    def join(self, session: Any, regions: Any, layouts: Any, fault: Fault | None) -> None:
        if self._executor is not None:
            self._executor.close()
        self._executor, self._layouts, self._plan = None, layouts, session.plan
        layout = layouts[self._rank]
        self._source_digests = SourceDigests(layout, regions, session.plan.dtype_of)
        self._reported = told = session.plan, layout
        if fault is not None:
            self._reported = told = fault.spoil(self._rank, *told)
        self._executor = join_session(
            replace(session, plan=told[0]), self._rank, told[1], store=self._store
        )

    def send(self, folder: str, version: int, fault: Fault | None) -> Any:
        tensors = load_file(Path(folder) / "model.safetensors")
        layout = self._layouts[self._rank]
        shards = cut(layout, tensors)
        model = tuple((name, tensor.shape) for name, tensor in tensors.items())
        last, self._last_sent[model] = self._last_sent.get(model, tensors), tensors
        injected = nullcontext()
        if fault is not None and fault.rank == self._rank:
            if fault.kind in TOLD_FAULTS:
                self.hit = told_hit(self._rank, (self._plan, layout), self._reported, shards)
            else:
                spoilers = {"right": shards}
                if fault.kind == "foreign":
                    spoilers["foreign"] = cut(self._layouts[self._rank ^ 1], tensors)
                elif fault.kind == "old":
                    spoilers["old"] = cut(layout, last)
                injected = inject(fault, self._rank, self._executor, self._plan, spoilers)
        with injected as hit:
            self.hit = hit or self.hit
            self._executor.send(shards, version, self._source_digests.make_copy_fn())
        return self._source_digests.compute(shards.__getitem__)
