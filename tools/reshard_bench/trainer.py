"""Trainer ranks in processes of their own, without Megatron, that hold shards and send them."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mega_agentrl.reshard.frames import PartBatch
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.session import TransferSession, join_session, open_store
from mega_agentrl.reshard.verify.copy_table import compile_kernel
from mega_agentrl.reshard.verify.digest_verifier import SourceDigests
from tools.measurement import PeakMemory
from tools.reshard_bench.baselines import BaselineBucket, BaselineSender
from tools.reshard_bench.model import make_shards, trainer_layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.reshard.executor import TransferExecutor
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion

ADDRESS = "127.0.0.1"
TIMEOUT_S = 120.0


class TrainerRank:
    """One rank; the driver calls its methods through `Trainer`."""

    def __init__(self, rank: int, folder: str) -> None:
        shape = ModelShape.from_folder(folder)
        self._rank = rank
        self._layouts = trainer_layouts(shape)
        self._shards = make_shards(shape, self._layouts[rank])
        self._store: Any = None
        self._executor: TransferExecutor | None = None
        self._source_digests: SourceDigests | None = None
        self._baselines: dict[str, BaselineSender] = {}
        self._peak_memory: PeakMemory | None = None
        self._proof_s = 0.0

    def open(self) -> int | None:
        """Open the store on rank 0 and return its port."""
        if self._rank:
            return None
        self._store = open_store(ADDRESS, TIMEOUT_S)
        return int(self._store.port)

    def meet(self, port: int) -> None:
        """Connect the other ranks to the store."""
        if self._rank:
            timeout = timedelta(seconds=TIMEOUT_S)
            self._store = TCPStore(ADDRESS, port, is_master=False, timeout=timeout)

    def join(self, session: TransferSession, regions: Sequence[DigestRegion]) -> None:
        """Join a session of our path, leaving any other."""
        self.leave()
        layout = self._layouts[self._rank]
        self._source_digests = SourceDigests(layout, regions, session.plan.dtype_of)
        self._executor = join_session(session, self._rank, layout, store=self._store)

    def leave(self) -> None:
        """Leave the session."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def send(self, version: int, proof: bool) -> Any:
        """Send by our path; return the digests of the rank if `proof` is set."""
        assert self._executor is not None and self._source_digests is not None, "join comes first"
        copy_fn = self._source_digests.make_copy_fn() if proof else PartBatch.pack
        self._proof_s = 0.0
        self._executor.send(self._shards, version, self._timed(copy_fn))
        compute = self._timed(self._source_digests.compute)
        return compute(self._shards.__getitem__) if proof else None

    def proof_s(self) -> float:
        """Return the CPU seconds of copying and digests in the last `send`."""
        return self._proof_s

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start_s = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._proof_s += time.thread_time() - start_s

        return call

    def join_baseline(
        self, baseline: str, buckets: Sequence[BaselineBucket], key: str, num_rollout_ranks: int
    ) -> None:
        """Create the groups of a baseline."""
        self._baselines[baseline] = BaselineSender(
            baseline, self._rank, self._layouts, buckets, self._store, key, num_rollout_ranks
        )

    def send_baseline(self, baseline: str) -> None:
        """Send by a baseline."""
        self._baselines[baseline].send(self._shards)

    def advance(self) -> None:
        """Change the weights: every matrix grows slightly."""
        for values in self._shards.values():
            if values.ndim > 1:
                values.mul_(1.0 + 2**-6)

    def start_peak(self) -> None:
        """Compile the digest's kernel, and measure memory from then on."""
        compile_kernel()
        self._peak_memory = PeakMemory()

    def peak(self) -> float:
        """Return the peak in MiB since `start_peak`."""
        assert self._peak_memory is not None, "start_peak comes first"
        return self._peak_memory.peak_mib()

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process so far."""
        return time.process_time()


class Trainer:
    """Calls a method on all trainer ranks; answers are in the order of the ranks."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rank, str(folder)), daemon=True, name=f"rank {rank}"
            )
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def start(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting."""
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def collect(self) -> list[Any]:
        """Return the answers to the oldest call; raise `RuntimeError` with a rank's traceback."""
        ends_s = time.monotonic() + 2 * TIMEOUT_S
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, ends_s - time.monotonic())):
                raise RuntimeError(f"trainer rank {rank}: no answer within {2 * TIMEOUT_S:g} s")
            failure, answer = pipe.recv()
            if failure:
                raise RuntimeError(f"trainer rank {rank}:\n{failure}")
            answers.append(answer)
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method and return the answers."""
        self.start(method, *arguments)
        return self.collect()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join(10)


def _serve(pipe: Any, rank: int, folder: str) -> None:
    # If memory runs out, the kernel should kill this process and not another one.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    target = TrainerRank(rank, folder)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[str | None, Any] = (None, getattr(target, method)(*arguments))
        except Exception:  # noqa: BLE001 - the edge of the process
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
