"""The devices a run is planned for, and what on them belongs to nobody's tensors.

`runtime_bytes` (CUDA context, communicators, libraries' workspaces) and `reserve` (what the
allocator cannot use between tensors that come and go) are assumptions, not measured here; all
else in the estimates is counted. For a CPU both are measured (`tools/bench_memory.py`): the weight
transfer loads a compiler for its digests, and an engine keeps compiled kernels
(`generator.environment`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.config.choices import Dtype

GIB = 2**30
CPU_LIBRARIES_BYTES = 45 * 2**20
"""Of libraries that a process on a CPU loads once it has a model."""
CPU_KERNEL_BYTES = 90 * 2**20
"""Of an engine on a CPU: the kernels it keeps, with their workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or with gib None a CPU, whose memory has no bound here.

    per_node: GPUs of a machine. reserve: share of the memory that is not planned with.
    """

    gib: float | None = 80.0
    per_node: int = 8
    reserve: float = 0.04
    policy_runtime_bytes: int = 3 * GIB
    engine_runtime_bytes: int = 2 * GIB

    def __post_init__(self) -> None:
        if self.gib is not None and self.gib <= 0:
            raise ValueError(f"gib={self.gib}: expected the GiB of a GPU, above 0")
        if self.per_node < 1:
            raise ValueError(f"per_node={self.per_node}: expected GPUs of a machine, at least 1")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: expected a share, 0 to below 1")

    @property
    def is_gpu(self) -> bool:
        """False for a CPU."""
        return self.gib is not None

    @property
    def usable_bytes(self) -> float:
        """What may be planned with; infinite for a CPU."""
        return float("inf") if self.gib is None else self.gib * GIB * (1 - self.reserve)

    def train_item_bytes(self, dtype: Dtype) -> int:
        """Bytes of a weight of the policy."""
        if dtype is Dtype.auto:
            return 2 if self.is_gpu else 4
        return 2 if dtype is Dtype.bfloat16 else 4

    @property
    def engine_item_bytes(self) -> int:
        """Bytes of a weight of an engine, and of a number in its KV cache."""
        return 2 if self.is_gpu else 4
