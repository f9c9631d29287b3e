"""What a process has really taken of the host's memory, to hold against the estimate.

    taken = peak of the private pages since `begin` - private pages at `begin`

Private pages (RssAnon) are the heap and what is mapped without a file: tensors, and not the
libraries' code, files that were read by mapping them, or memory shared with other processes. The
kernel keeps a peak (VmHWM) only of all resident pages together; file and shared pages as they
are now come off it, which is exact while they only grow.

`begin` is called when libraries are loaded and before the model is made: what is there by then is
a process with its libraries, the same for any model, and a line by itself. GPU memory is CUDA's.

From `begin` on large blocks lie apart from the heap and go back to the system when they are freed.
The C library would keep them otherwise, and small ones between them: a process then grows with
use to a multiple of its tensors, which no estimate can foretell. What small blocks leave behind
goes back by `trim`: else the tensors of short micro-batches, which are small blocks, would stay
as holes beside those of long ones.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes of this process. peak: of all pages together, since it was last reset."""

    private: int
    file: int
    shared: int
    peak: int

    @classmethod
    def now(cls) -> Resident:
        """As the kernel counts now."""
        return cls.read(_STATUS.read_text(encoding="ascii"))

    @classmethod
    def read(cls, status: str) -> Resident:
        """From the text of `/proc/<pid>/status`."""
        fields = dict(line.split(":", 1) for line in status.splitlines())
        kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
        return cls(
            private=kib["RssAnon"] << 10,
            file=kib["RssFile"] << 10,
            shared=kib["RssShmem"] << 10,
            peak=int(fields["VmHWM"].split()[0]) << 10,
        )


class HostMemory:
    """Counts for one process, from the first `begin` on."""

    def __init__(self) -> None:
        self.before: Resident | None = None

    def begin(self) -> None:
        """Count from here on; later calls change nothing."""
        if self.before is not None:
            return
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        self.before = Resident.now()

    def trim(self) -> None:
        """Give free pages between small blocks back, in some 5 ms; nothing before `begin`."""
        if self.before is not None:
            ctypes.CDLL(None).malloc_trim(0)

    def libraries_mib(self) -> float:
        """Private pages at `begin`; 0 before it."""
        return 0.0 if self.before is None else self.before.private / MIB

    def taken_mib(self) -> float:
        """See the module; 0 before `begin`."""
        if self.before is None:
            return 0.0
        now = Resident.now()
        return max(0, now.peak - now.file - now.shared - self.before.private) / MIB


PROCESS = HostMemory()
"""Of this process."""
