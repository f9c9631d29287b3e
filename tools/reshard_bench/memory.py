"""Peak memory of this process above what was resident before."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MIB = 1 << 20


def resident_bytes(field: str = "VmRSS") -> int:
    """Return VmRSS (resident now), RssShmem (its shared part) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


class PeakMemory:
    """Measures from its construction on; freed memory is first returned to the system."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._resident = resident_bytes()
        self._shared = resident_bytes("RssShmem")

    def peak_mib(self) -> float:
        """Return the peak in MiB."""
        return (resident_bytes("VmHWM") - self._resident) / MIB

    def private_peak_mib(self) -> float:
        """Return the peak in MiB without shared memory.

        If frames are read in the sender's memory, its pages are resident here too, from the first
        frame on.
        """
        return self.peak_mib() - (resident_bytes("RssShmem") - self._shared) / MIB
