"""What the bench asks of vLLM's workers: the receiving half of the usual path, our own movement
by itself, and where the seconds and the memory go. Mixed into the worker class.

Methods answer (failure or None, value) and never raise, as `WorkerExtension` says.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch.distributed import TCPStore
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)

from mega_agentrl.generator import landing
from mega_agentrl.generator.worker_extension import WorkerExtension
from mega_agentrl.reshard.courier import Courier
from mega_agentrl.reshard.delivery import Place
from mega_agentrl.reshard.proof import Regions
from mega_agentrl.reshard.weigh import kernel
from tools.reshard_bench.memory import Peak
from tools.reshard_bench.usual import UsualReceiver

Answer = tuple[str | None, Any]


def _told(method: Callable[..., Any]) -> Callable[..., Answer]:
    @wraps(method)
    def call(*arguments: Any) -> Answer:
        try:
            return None, method(*arguments)
        except Exception:  # noqa: BLE001 - the edge of the worker process
            return traceback.format_exc(), None

    return call


class Ledger:
    """Seconds by kind of work, of all calls that are watched, or which kinds to leave out."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.left_out: set[str] = set()
        self.received_bytes = 0

    def watch(self, owner: Any, name: str, kind: str, instead: Callable[..., Any]) -> None:
        """Count a function's seconds; where its kind is left out, call another one instead and
        count that one's as "without KIND"."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            out = kind in self.left_out
            label = f"without {kind}" if out else kind
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return (instead if out else function)(*arguments, **keywords)
            finally:
                self.wall_s[label] += time.perf_counter() - start_s
                self.cpu_s[label] += time.thread_time() - cpu_s

        setattr(owner, name, call)


LEDGER = Ledger()


class BenchExtension(WorkerExtension):
    """See the module."""

    @_told
    def bench_install(self) -> None:
        """Watch packing, which both paths pay, and proof; compile what is compiled once."""
        kernel()
        watched = set()
        for module in self.weight_transfer_engine.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and id(method) not in watched:
                watched.add(id(method))
                LEDGER.watch(method, "process_weights_after_loading", "packing", _nothing)
        place = layerwise._place_kernel_tensors
        LEDGER.watch(layerwise, "_copy_and_restore_kernel_tensors", "packing", place)
        LEDGER.watch(landing, "drop_packed", "packing", _nothing)
        LEDGER.watch(Regions, "copy", "proof", _plain_copy)
        LEDGER.watch(Regions, "take", "proof", _nothing)
        LEDGER.watch(Regions, "mismatches", "proof", _nothing)
        receive = Courier.receive

        def counted(courier: Courier, *arguments: Any) -> Any:
            report = receive(courier, *arguments)
            LEDGER.received_bytes = report.received_bytes
            return report

        Courier.receive = counted
        self._usual: dict[str, UsualReceiver] = {}

    @_told
    def bench_spent(self) -> dict[str, Any]:
        """Seconds since the last question, CPU seconds of the process, bytes of our last update."""
        spent = {
            "wall_s": dict(LEDGER.wall_s),
            "cpu_s": dict(LEDGER.cpu_s),
            "process_s": time.process_time(),
            "received_bytes": LEDGER.received_bytes,
        }
        LEDGER.wall_s.clear()
        LEDGER.cpu_s.clear()
        return spent

    @_told
    def bench_leave_out(self, kinds: list[str]) -> None:
        """Leave out packing or proof from now on; without packing no weights change."""
        LEDGER.left_out = set(kinds)

    @_told
    def bench_start_peak(self) -> None:
        """Memory counts from here, without what an old link holds."""
        self.weight_transfer_engine.shutdown()
        self._peak = Peak()

    @_told
    def bench_peak(self) -> float:
        """MiB of its own at the peak since."""
        return self._peak.own_mib()

    @_told
    def bench_begin(self) -> None:
        """Make the parameters loadable."""
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.weight_transfer_engine.model)

    @_told
    def bench_move(self, version: int) -> float:
        """Receive by our path between `bench_begin` and `bench_end`; seconds."""
        engine = self.weight_transfer_engine
        start_s = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            engine._landing.begin()
            engine._courier.receive(engine._landing, version)
            engine._landing.check_complete()
        return time.perf_counter() - start_s

    @_told
    def bench_receive_only(self, version: int) -> None:
        """Receive by our path and drop it."""
        self.weight_transfer_engine._courier.receive(_Nowhere(), version)

    @_told
    def bench_join_usual(self, peer: str, parcels: bytes, key: str, address: str, port: int) -> int:
        """Make the groups of the usual path; returns the bytes this rank is going to receive."""
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=120))
        sink, count = get_tensor_model_parallel_rank(), self.parallel_config.tensor_parallel_size
        self._usual[peer] = UsualReceiver(sink, pickle.loads(parcels), store, key, count)
        return self._usual[peer].received_bytes

    @_told
    def bench_move_usual(self, peer: str) -> float:
        """Receive by the usual path between `bench_begin` and `bench_end`; seconds."""
        model = self.weight_transfer_engine.model
        start_s = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            for tensors in self._usual[peer].buckets():
                model.load_weights(tensors)
        return time.perf_counter() - start_s

    @_told
    def bench_end(self) -> None:
        """Back to serving."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(engine.model, engine.model_config)


class _Nowhere:
    """A `courier.Landing` that keeps nothing."""

    def write(self, place: Place, values: torch.Tensor) -> None:
        """See `courier.Landing.write`."""


def _plain_copy(regions: Regions, place: Place, to: torch.Tensor, values: torch.Tensor) -> None:
    """A copy without a digest."""
    to.copy_(values)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """In place of what is left out."""
