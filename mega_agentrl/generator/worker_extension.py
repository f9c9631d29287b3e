"""Methods that the engine calls on its workers through `collective_rpc`.

vLLM mixes this class into its worker class. Answers are plain picklable values; what is not
plain travels as pickled bytes. Only tensor-parallel rank 0 has measurements; the others answer
None.

Methods do not raise: vLLM would take the other workers' answers for those to the next call.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Sequence

import torch

from mega_agentrl.estimate.measured import MIB, PROCESS
from mega_agentrl.generator.entropy_tap import STORE
from mega_agentrl.reshard.whereabouts import here

CPU_NICENESS = 10

PlainRecord = tuple[Sequence[float], Sequence[float], Sequence[int]]
"""Entropies, shifts and arg-max ids of one request; lists once they have crossed a process."""


class WorkerExtension:
    """Mixed into the vLLM worker; names carry a prefix, so that they collide with none."""

    def tap_read(self, keys: list[str], take: bool) -> list[PlainRecord] | None:
        """Measurements of requests, in order; `take` forgets them."""
        if self.rank % self.parallel_config.tensor_parallel_size != 0:
            return None
        read = STORE.take if take else STORE.read
        records = [read(key) for key in keys]
        return [(record.entropies, record.shifts, record.argmax_ids) for record in records]

    def tap_size(self) -> int:
        """Number of requests with measurements."""
        return len(STORE)

    def tap_count(self) -> int:
        """Number of tokens measured so far, in the life of this worker."""
        return STORE.num_measured

    def memory_taken(self) -> dict[str, float]:
        """MiB that this worker has taken at most; on a CPU also its libraries, which are not in
        that.
        """
        if self.device.type == "cuda":
            return {"peak_mib": torch.cuda.max_memory_reserved() / MIB}
        return {"peak_mib": PROCESS.taken_mib(), "libraries_mib": PROCESS.libraries_mib()}

    def weights_layout(self) -> tuple[str | None, bytes]:
        """What went wrong, or the pickled layout and whereabouts of this worker."""
        try:
            found = (self.weight_transfer_engine.layout(), here())
        except Exception as error:  # noqa: BLE001 - the edge of the worker process
            return f"{type(error).__name__}: {error}", b""
        return None, pickle.dumps(found)

    def weights_guard(self) -> None:
        """Called once after the start: no step of the model with weights that are not proven."""
        runner = self.model_runner
        runner.execute_model = self.weight_transfer_engine.guarded(runner.execute_model)

    def weights_failure(self) -> tuple[bool, str] | None:
        """What went wrong in the present weight update, and whether it followed from a peer."""
        failure = self.weight_transfer_engine.failure
        return failure and (failure.is_consequence, failure.reason)

    def weights_verify(self, version: int, expected: bytes) -> None:
        """Compare with the trainer's digests. expected: pickled, by tensor rank."""
        mine = pickle.loads(expected)[self.rank % self.parallel_config.tensor_parallel_size]
        self.weight_transfer_engine.verify(version, mine)

    def weights_reject(self, reason: str) -> None:
        """Give up the present weight update, for vLLM's worker as well."""
        self.weight_transfer_engine.reject(reason)
        self._weight_update_active = False

    def weights_drop(self) -> None:
        """The memory of the weights is about to be given up."""
        self.weight_transfer_engine.drop()

    def settle(self) -> None:
        """Called once after the start.

        Keeps what the start allocated out of garbage collection, as vLLM does on GPUs only. On a
        CPU, gives way to other processes: after its last step a worker polls for work for a
        second at full speed, on cores that the trainer needs by then.
        """
        gc.collect()
        gc.freeze()
        if self.device.type == "cpu":
            os.nice(CPU_NICENESS)
