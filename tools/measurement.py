"""What the benchmarks share: the JSON line of a case, and the peak memory of this process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from mega_agentrl.estimate.host_memory import MIB, ResidentMemory


def bench_line(
    bench: str, case: str, unit: str, ours: float | None, baseline: float | None
) -> dict[str, object]:
    """Return the line with the keys bench, case, unit, ours, baseline and ratio.

    ratio = baseline / ours, so more is better. None means not measured or, for the ratio,
    undefined.
    """
    has_ratio = ours and baseline is not None
    return {
        "bench": bench,
        "case": case,
        "unit": unit,
        "ours": None if ours is None else round(ours, 6),
        "baseline": None if baseline is None else round(baseline, 6),
        "ratio": round(baseline / ours, 4) if has_ratio else None,
    }


class PeakMemory:
    """Measures what this process takes, from the construction on, beyond what was resident then.

    Args:
        trim: whether to return freed memory to the system first, so that its reuse counts.
    """

    def __init__(self, *, trim: bool = True) -> None:
        if trim:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before = ResidentMemory.current()
        self._resident_bytes = before.private_bytes + before.file_bytes + before.shared_bytes
        self._shared_bytes = before.shared_bytes

    def peak_mib(self) -> float:
        """Return the peak in MiB."""
        return (ResidentMemory.current().peak_bytes - self._resident_bytes) / MIB

    def private_peak_mib(self) -> float:
        """Return the peak in MiB without shared memory.

        If frames are read in the sender's memory, its pages are resident here too, from the first
        frame on.
        """
        return self.peak_mib() - (ResidentMemory.current().shared_bytes - self._shared_bytes) / MIB
