"""What a process has taken: read from the kernel, kept after it is freed, counted once."""

import mmap
import tempfile

from mega_agentrl.estimate.measured import MIB, HostMemory, Resident

STATUS = """Name:\tpython
VmHWM:\t    1000 kB
VmRSS:\t     900 kB
RssAnon:\t     600 kB
RssFile:\t     250 kB
RssShmem:\t      50 kB
"""


def test_the_kernels_lines_are_kib():
    assert Resident.read(STATUS) == Resident(
        private=600 << 10, file=250 << 10, shared=50 << 10, peak=1000 << 10
    )


def test_nothing_is_counted_before_the_beginning():
    memory = HostMemory()
    assert (memory.libraries_mib(), memory.taken_mib()) == (0.0, 0.0)


def test_the_peak_stays_when_memory_is_given_back():
    memory = HostMemory()
    memory.begin()
    assert memory.libraries_mib() > 1
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.write(b"x" * MIB * 64)
        before = memory.before
        memory.begin()
        assert memory.before is before, "only the first beginning counts"
    assert 60 < memory.taken_mib() < 140  # the bytes that are written are there twice


def test_a_file_that_is_read_by_mapping_it_is_not_taken():
    with tempfile.TemporaryFile() as file:
        for _ in range(64):
            file.write(bytes(MIB))
        file.flush()
        memory = HostMemory()
        memory.begin()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[at] for at in range(0, len(mapped), 4096)) == 0
            assert memory.taken_mib() < 16
