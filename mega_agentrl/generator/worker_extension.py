"""Methods that the engine calls on its workers through `collective_rpc`.

vLLM mixes this class into its worker class. Answers are plain picklable values. Only
tensor-parallel rank 0 has measurements; the others answer None.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from mega_agentrl.generator.entropy_tap import STORE

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
