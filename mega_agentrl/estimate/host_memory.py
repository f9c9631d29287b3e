"""Measures the host memory that a process takes for its model, to compare it with the estimate.

    peak_mib = peak of the private pages since `start` - private pages at `start`

Private pages (RssAnon) are the heap and anonymous mappings, which hold the tensors; they exclude
library code, mapped files and shared memory. The kernel keeps a peak (VmHWM) only of all resident
pages, so the current file and shared pages are subtracted from it, which is exact while they only
grow.

Call `start` when the libraries are loaded and before the model is built. `start` also makes malloc
map large blocks separately, so that they return to the system when they are freed; otherwise
fragmentation makes the heap grow to an unpredictable multiple of the tensors.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

from mega_agentrl.estimate.device import MIB

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentMemory:
    """Resident memory of a process."""

    private_bytes: int
    """Bytes of anonymous pages (RssAnon)."""
    file_bytes: int
    """Bytes of file-backed pages (RssFile)."""
    shared_bytes: int
    """Bytes of shared memory (RssShmem)."""
    peak_bytes: int
    """Peak bytes of all resident pages since the last reset (VmHWM)."""

    @classmethod
    def current(cls) -> ResidentMemory:
        """Return the current values of this process."""
        return cls.parse(_STATUS.read_text(encoding="ascii"))

    @classmethod
    def parse(cls, status: str) -> ResidentMemory:
        """Parse the text of `/proc/<pid>/status`."""
        fields = dict(line.split(":", 1) for line in status.splitlines())
        kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
        return cls(
            private_bytes=kib["RssAnon"] << 10,
            file_bytes=kib["RssFile"] << 10,
            shared_bytes=kib["RssShmem"] << 10,
            peak_bytes=int(fields["VmHWM"].split()[0]) << 10,
        )


class HostMemoryTracker:
    """Tracks the private memory of this process from the first `start` on."""

    def __init__(self) -> None:
        self.baseline: ResidentMemory | None = None
        """Memory of the process at `start`; None before it."""

    def start(self) -> None:
        """Start tracking; later calls do nothing."""
        if self.baseline is not None:
            return
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
        self.baseline = ResidentMemory.current()

    def trim(self) -> None:
        """Return free pages between small blocks, such as short tensors, to the system.

        A call takes about 5 ms. Before `start` it does nothing.
        """
        if self.baseline is not None:
            ctypes.CDLL(None).malloc_trim(0)

    def libraries_mib(self) -> float:
        """Return the MiB of private pages at `start`, 0 before it."""
        return 0.0 if self.baseline is None else self.baseline.private_bytes / MIB

    def peak_mib(self) -> float:
        """Return the peak MiB of private pages beyond those at `start`, 0 before it."""
        if self.baseline is None:
            return 0.0
        now = ResidentMemory.current()
        return (
            max(0, now.peak_bytes - now.file_bytes - now.shared_bytes - self.baseline.private_bytes)
            / MIB
        )


PROCESS_MEMORY = HostMemoryTracker()
"""The tracker of this process."""
