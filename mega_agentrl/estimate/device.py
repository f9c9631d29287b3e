"""Describes the devices that a run is planned for, and their memory overhead besides tensors.

The runtime bytes (CUDA context, communicators, library workspaces) and the reserved fraction
(allocator fragmentation) are assumptions; the estimates count everything else. The constants for
CPUs were measured with `tools/bench_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.config.enums import Dtype
from mega_agentrl.errors import InputError

GIB = 2**30
MIB = 2**20
CPU_LIBRARIES_BYTES = 45 * MIB
"""Bytes of libraries that a process on a CPU loads after its model, such as numba for digests."""
CPU_KERNEL_BYTES = 90 * MIB
"""Bytes of compiled kernels and their workspaces that an engine keeps on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The device of a rank: a GPU, or a CPU whose memory is assumed to be unlimited."""

    memory_gib: float | None = 80.0
    """Memory of a GPU in GiB; None for a CPU."""
    gpus_per_node: int = 8
    """Number of GPUs per node."""
    reserved_fraction: float = 0.04
    """Fraction of the memory that is left unplanned, for allocator fragmentation."""
    policy_runtime_bytes: int = 3 * GIB
    """Assumed bytes of the CUDA context and libraries of a policy rank."""
    engine_runtime_bytes: int = 2 * GIB
    """Assumed bytes of the CUDA context and libraries of an engine rank."""

    def __post_init__(self) -> None:
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise InputError("memory_gib", self.memory_gib, "the GiB of a GPU, above 0")
        if self.gpus_per_node < 1:
            raise InputError("gpus_per_node", self.gpus_per_node, "at least 1")
        if not 0 <= self.reserved_fraction < 1:
            raise InputError("reserved_fraction", self.reserved_fraction, "0 to below 1")

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.memory_gib is not None

    @property
    def usable_bytes(self) -> float:
        """Bytes that may be planned with; infinite for a CPU."""
        if self.memory_gib is None:
            return float("inf")
        return self.memory_gib * GIB * (1 - self.reserved_fraction)

    def item_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of one weight, activation or KV cache element in this dtype.

        Args:
            dtype: `model.dtype`; `auto` depends on the device.
        """
        return 2 if dtype.resolve(on_gpu=self.is_gpu) is Dtype.bfloat16 else 4
