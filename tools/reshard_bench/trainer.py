"""Trainer ranks as processes of their own, without Megatron: they hold shards and send them."""

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

from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.proof import Witness
from mega_agentrl.reshard.transport import WeightLink, join, open_store
from mega_agentrl.reshard.weigh import kernel
from tools.reshard_bench.memory import Peak
from tools.reshard_bench.model import make_shards, trainer_layouts
from tools.reshard_bench.usual import Parcel, UsualSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.reshard.courier import Courier
    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.proof import Region

ADDRESS = "127.0.0.1"
TIMEOUT_S = 120.0


class TrainerRank:
    """One rank; its methods are called by the driver, see `Trainer`."""

    def __init__(self, rank: int, folder: str) -> None:
        shape = ModelShape.from_folder(folder)
        self._rank = rank
        self._layouts = trainer_layouts(shape)
        self._shards = make_shards(shape, self._layouts[rank])
        self._store: Any = None
        self._courier: Courier | None = None
        self._witness: Witness | None = None
        self._usual: dict[str, UsualSender] = {}
        self._peak: Peak | None = None
        self._proof_s = 0.0

    def open(self) -> int | None:
        """Rank 0 opens the meeting point; returns its port."""
        if self._rank:
            return None
        self._store = open_store(ADDRESS, TIMEOUT_S)
        return int(self._store.port)

    def meet(self, port: int) -> None:
        """The others go there."""
        if self._rank:
            timeout = timedelta(seconds=TIMEOUT_S)
            self._store = TCPStore(ADDRESS, port, is_master=False, timeout=timeout)

    def join(self, link: WeightLink, regions: Sequence[Region]) -> None:
        """Join our link; ends any other."""
        self.leave()
        layout = self._layouts[self._rank]
        self._witness = Witness(layout, regions, link.plan.dtype_of)
        self._courier = join(link, self._rank, layout, store=self._store)

    def leave(self) -> None:
        """Leave our link."""
        if self._courier is not None:
            self._courier.close()
            self._courier = None

    def send(self, version: int, proof: bool) -> Any:
        """Our path; returns what the rank testifies."""
        assert self._courier is not None and self._witness is not None, "join comes first"
        copy = self._witness.watch() if proof else _plain_copy
        self._proof_s = 0.0
        self._courier.send(self._shards, version, self._timed(copy))
        testify = self._timed(self._witness.testify)
        return testify(self._shards.__getitem__) if proof else None

    def proof_s(self) -> float:
        """CPU seconds of copying and testifying in the last `send`."""
        return self._proof_s

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start_s = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._proof_s += time.thread_time() - start_s

        return call

    def join_usual(self, peer: str, parcels: Sequence[Parcel], key: str, num_sinks: int) -> None:
        """Make the groups of the usual path."""
        self._usual[peer] = UsualSender(
            peer, self._rank, self._layouts, parcels, self._store, key, num_sinks
        )

    def send_usual(self, peer: str) -> None:
        """The usual path."""
        self._usual[peer].send(self._shards)

    def advance(self) -> None:
        """New weights: every matrix a little larger."""
        for values in self._shards.values():
            if values.ndim > 1:
                values.mul_(1.0 + 2**-6)

    def start_peak(self) -> None:
        """Memory counts from here, less the compiler's, which a process needs once."""
        kernel()
        self._peak = Peak()

    def peak(self) -> float:
        """MiB at the peak since."""
        assert self._peak is not None, "start_peak comes first"
        return self._peak.mib()

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()


class Trainer:
    """The driver's side: calls a method on all ranks; answers come in order of the ranks."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, str(folder)), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, method: str, *arguments: Any) -> None:
        """Call without waiting."""
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def collect(self) -> list[Any]:
        """Answers to the oldest call; raises `RuntimeError` with the trace of a rank."""
        ends_s = time.monotonic() + 2 * TIMEOUT_S
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, ends_s - time.monotonic())):
                raise RuntimeError(f"trainer rank {rank} gives no answer")
            failure, answer = pipe.recv()
            if failure:
                raise RuntimeError(f"trainer rank {rank}:\n{failure}")
            answers.append(answer)
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Both."""
        self.start(method, *arguments)
        return self.collect()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join(10)


def _plain_copy(place: Place, to: torch.Tensor, values: torch.Tensor) -> None:
    to.copy_(values)


def _serve(pipe: Any, rank: int, folder: str) -> None:
    # If memory ends, this process is to go, not somebody else's.
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
