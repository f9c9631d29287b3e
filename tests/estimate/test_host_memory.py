"""Memory of this process: read from the kernel; the peak remains after memory is freed."""

import mmap
import subprocess
import sys
import tempfile

from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import HostMemoryTracker, ResidentMemory

STATUS = """Name:\tpython
VmHWM:\t    1000 kB
VmRSS:\t     900 kB
RssAnon:\t     600 kB
RssFile:\t     250 kB
RssShmem:\t      50 kB
"""


def test_proc_status_is_in_kib():
    assert ResidentMemory.parse(STATUS) == ResidentMemory(
        private_bytes=600 << 10, file_bytes=250 << 10, shared_bytes=50 << 10, peak_bytes=1000 << 10
    )


def test_nothing_is_counted_before_the_start():
    memory = HostMemoryTracker()
    assert (memory.libraries_mib(), memory.peak_mib()) == (0.0, 0.0)


def test_the_peak_stays_when_memory_is_given_back():
    memory = HostMemoryTracker()
    memory.start()
    assert memory.libraries_mib() > 1
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.write(b"x" * MIB * 64)
        before = memory.baseline
        memory.start()
        assert memory.baseline is before, "only the first beginning counts"
    assert 60 < memory.peak_mib() < 140  # the bytes that are written are there twice


def test_a_mapped_file_is_not_counted():
    with tempfile.TemporaryFile() as file:
        for _ in range(64):
            file.write(bytes(MIB))
        file.flush()
        memory = HostMemoryTracker()
        memory.start()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[at] for at in range(0, len(mapped), 4096)) == 0
            assert memory.peak_mib() < 16


def test_freed_large_blocks_are_returned_to_the_system():
    # In a process of its own: the setting stays. The first block, freed, makes the C library put
    # later ones of its size into the heap.
    program = """
from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import HostMemoryTracker, ResidentMemory
if {begins}:
    HostMemoryTracker().start()
del (block := [bytearray(16 * MIB)])[0]
large, small = [], []
for _ in range(16):
    large.append(bytearray(4 * MIB))
    large[-1][::4096] = bytes(MIB // 1024)
    small.append(bytearray(64000))
before = ResidentMemory.current().private_bytes
large.clear()
print((before - ResidentMemory.current().private_bytes) / MIB)
"""
    freed = [
        float(subprocess.check_output([sys.executable, "-c", program.format(begins=begins)]))
        for begins in (True, False)
    ]
    assert freed[0] > 60 > freed[1]


def test_trim_returns_freed_small_blocks():
    # In a process of its own, where nothing else allocates.
    program = """
from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import HostMemoryTracker, ResidentMemory
memory = HostMemoryTracker()
memory.trim()
memory.start()
blocks = [bytearray(b"x" * 64000) for _ in range(1024)]
del blocks[::2]
before = ResidentMemory.current().private_bytes
memory.trim()
print((before - ResidentMemory.current().private_bytes) / MIB)
"""
    freed = float(subprocess.check_output([sys.executable, "-c", program]))
    assert 25 < freed < 40  # 512 blocks of 62.5 KiB, up to whole pages
