"""Worker side of the benchmark: receiving by either path, and recording seconds and memory.

`BenchExtension` is mixed into vLLM's worker class. Its methods return (traceback or None, value)
and never raise, because vLLM would then mix up the answers of its workers (`worker_extension`).
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

from mega_agentrl.generator.weights import weight_writer
from mega_agentrl.generator.worker_extension import WorkerExtension
from mega_agentrl.reshard.executor import TransferExecutor
from mega_agentrl.reshard.frames import PartBatch
from mega_agentrl.reshard.session import TransferContent
from mega_agentrl.reshard.verify.copy_table import compile_kernel
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests
from tools.measurement import PeakMemory
from tools.reshard_bench.baselines import BaselineReceiver

Answer = tuple[str | None, Any]


def _catch_errors(method: Callable[..., Any]) -> Callable[..., Answer]:
    @wraps(method)
    def call(*arguments: Any) -> Answer:
        try:
            return None, method(*arguments)
        except Exception:  # noqa: BLE001 - the edge of the worker process
            return traceback.format_exc(), None

    return call


class TimingRecorder:
    """Records the seconds of all watched functions by kind of work, and excludes some kinds."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.excluded_kinds: set[str] = set()
        self.received_bytes = 0

    def watch(self, owner: Any, name: str, kind: str, replacement: Callable[..., Any]) -> None:
        """Record a function's seconds.

        While its kind is excluded, `replacement` is called and recorded as "without KIND".
        """
        function = getattr(owner, name)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            is_excluded = kind in self.excluded_kinds
            label = f"without {kind}" if is_excluded else kind
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return (replacement if is_excluded else function)(*arguments, **keywords)
            finally:
                self.wall_s[label] += time.perf_counter() - start_s
                self.cpu_s[label] += time.thread_time() - cpu_s

        setattr(owner, name, call)


TIMINGS = TimingRecorder()


class BenchExtension(WorkerExtension):
    """Methods of the benchmark in vLLM's workers."""

    @_catch_errors
    def bench_install(self) -> None:
        """Watch packing, which both paths need, and the proof; compile the digest's kernel."""
        compile_kernel()
        watched_ids = set()
        for module in self.weight_transfer_engine.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and id(method) not in watched_ids:
                watched_ids.add(id(method))
                TIMINGS.watch(method, "process_weights_after_loading", "packing", _no_op)
        place_kernel_tensors = layerwise._place_kernel_tensors
        TIMINGS.watch(
            layerwise, "_copy_and_restore_kernel_tensors", "packing", place_kernel_tensors
        )
        TIMINGS.watch(weight_writer, "drop_packed_linear", "packing", _no_op)
        TIMINGS.watch(ReceivedDigests, "copy", "proof", _plain_copy)
        TIMINGS.watch(ReceivedDigests, "compute", "proof", _no_op)
        TIMINGS.watch(ReceivedDigests, "find_mismatches", "proof", _no_op)
        receive = TransferExecutor.receive

        def receive_and_count(executor: TransferExecutor, *arguments: Any) -> Any:
            report = receive(executor, *arguments)
            TIMINGS.received_bytes = report.received_bytes
            return report

        TransferExecutor.receive = receive_and_count
        self._baselines: dict[str, BaselineReceiver] = {}

    @_catch_errors
    def bench_read_timings(self) -> dict[str, Any]:
        """Return and reset the seconds by kind, with the CPU seconds of the process."""
        timings = {
            "wall_s": dict(TIMINGS.wall_s),
            "cpu_s": dict(TIMINGS.cpu_s),
            "process_s": time.process_time(),
            "received_bytes": TIMINGS.received_bytes,
        }
        TIMINGS.wall_s.clear()
        TIMINGS.cpu_s.clear()
        return timings

    @_catch_errors
    def bench_exclude(self, kinds: list[str]) -> None:
        """Exclude packing or proof from now on; without packing the served weights stay."""
        TIMINGS.excluded_kinds = set(kinds)

    @_catch_errors
    def bench_start_peak(self) -> None:
        """Free the memory of the last session, and measure memory from then on."""
        self.weight_transfer_engine.shutdown()
        self._peak_memory = PeakMemory()

    @_catch_errors
    def bench_peak(self) -> float:
        """Return the private peak in MiB since `bench_start_peak`."""
        return self._peak_memory.private_peak_mib()

    @_catch_errors
    def bench_begin(self) -> None:
        """Make the parameters loadable."""
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.weight_transfer_engine.model)

    @_catch_errors
    def bench_receive(self, version: int) -> None:
        """Receive by our path between `bench_begin` and `bench_end`."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            engine.writer.begin_update()
            engine.executors[TransferContent.weights].receive(engine.writer, version)
            engine.writer.check_complete()

    @_catch_errors
    def bench_receive_only(self, version: int) -> None:
        """Receive by our path and discard everything."""
        executor = self.weight_transfer_engine.executors[TransferContent.weights]
        executor.receive(_DiscardingWriter(), version)

    @_catch_errors
    def bench_join_baseline(
        self, baseline: str, buckets: bytes, key: str, address: str, port: int
    ) -> int:
        """Create the groups of a baseline; return the bytes that this rank will receive."""
        receiver = BaselineReceiver(
            get_tensor_model_parallel_rank(),
            pickle.loads(buckets),
            TCPStore(address, port, is_master=False, timeout=timedelta(seconds=120)),
            key,
            self.parallel_config.tensor_parallel_size,
        )
        self._baselines[baseline] = receiver
        return receiver.received_bytes

    @_catch_errors
    def bench_receive_baseline(self, baseline: str) -> None:
        """Receive by a baseline between `bench_begin` and `bench_end`."""
        model = self.weight_transfer_engine.model
        with set_current_vllm_config(self.vllm_config):
            for tensors in self._baselines[baseline].buckets():
                model.load_weights(tensors)

    @_catch_errors
    def bench_end(self) -> None:
        """Return to serving."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(engine.model, engine.model_config)


class _DiscardingWriter:
    """A `WeightWriter` that discards everything."""

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        """Discard the values."""


def _plain_copy(
    digests: ReceivedDigests, batch: PartBatch, frame: torch.Tensor, params: dict[str, torch.Tensor]
) -> None:
    """Copy without a digest."""
    batch.unpack(frame, params)


def _no_op(*arguments: Any, **keywords: Any) -> None:
    """Replace an excluded function."""
