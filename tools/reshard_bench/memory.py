"""Extra memory of this process: the peak of what is resident, above what was before."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MIB = 1 << 20


def resident_bytes(field: str = "VmRSS") -> int:
    """VmRSS, what is resident now, RssShmem of it, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


class Peak:
    """Counts from its making on; memory that is freed by then is given back before."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._resident = resident_bytes()
        self._shared = resident_bytes("RssShmem")

    def mib(self) -> float:
        """All there was at the peak."""
        return (resident_bytes("VmHWM") - self._resident) / MIB

    def own_mib(self) -> float:
        """The same without shared memory: where frames are read in the sender's memory, the pages
        of the sender are resident here too, from the first frame on.
        """
        return self.mib() - (resident_bytes("RssShmem") - self._shared) / MIB
