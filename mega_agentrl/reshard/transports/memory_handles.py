"""Memory that another process on the same machine can map, of the host or of a GPU.

    owner                                   peer
    block = memory.allocate(num_bytes)      tensor = memory.open(handle)
    handle = block.handle()    -> ...       ... tensor shares the memory ...

Host memory is a memfd: it is not limited by the size of /dev/shm, and it is freed when the last
process that maps it ends, even if that process is killed. A peer opens it as
/proc/<owner>/fd/<number>, so both must see the same processes and run as the same user. Device
memory is shared by CUDA IPC. torch counts its users, so each peer needs a handle of its own, and
memory that a killed peer had mapped stays allocated until its owner ends.

A mapping lives as long as a tensor on it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

_local_device_tensors: MutableMapping[str, torch.Tensor] = WeakValueDictionary()
"""Device memory of this process by name; CUDA refuses to map a process's own memory."""


class SharedBuffer(Protocol):
    """A block of memory of this process."""

    tensor: torch.Tensor
    """The whole block, flat uint8."""

    def handle(self) -> bytes:
        """Return the handle with which one more peer maps the block."""

    def close(self) -> None:
        """Declare that no more peers will map the block."""


class SharedMemory(Protocol):
    """Allocates one kind of shareable memory and maps the memory of peers."""

    def allocate(self, num_bytes: int) -> SharedBuffer:
        """Allocate memory with undefined values."""

    def open(self, handle: bytes) -> torch.Tensor:
        """Map the memory of a peer, flat uint8; raises `RuntimeError` if that fails."""

    def synchronize(self) -> None:
        """Block until all reads and writes of this thread are complete."""


class MemfdBuffer:
    """Host memory; pages are allocated when they are first written."""

    def __init__(self, num_bytes: int) -> None:
        self._name = f"reshard-{uuid.uuid4().hex}"
        self._file = os.fdopen(os.memfd_create(self._name), "r+b", buffering=0)
        self._file.truncate(num_bytes)
        self.tensor = _map_file(self._file.fileno())

    def handle(self) -> bytes:  # noqa: D102
        return f"{os.getpid()} {self._file.fileno()} {self._name}".encode()

    def close(self) -> None:  # noqa: D102
        self._file.close()


class MemfdMemory:
    """Host memory shared by processes of one machine."""

    def allocate(self, num_bytes: int) -> MemfdBuffer:  # noqa: D102
        return MemfdBuffer(num_bytes)

    def open(self, handle: bytes) -> torch.Tensor:  # noqa: D102
        pid, number, name = handle.decode().split()
        path = f"/proc/{pid}/fd/{number}"
        try:
            with open(path, "r+b", buffering=0) as file:
                got = os.readlink(f"/proc/self/fd/{file.fileno()}")
                if name in got:
                    return _map_file(file.fileno())
        except OSError as error:
            got = str(error)
        raise RuntimeError(
            f"memory of process {pid}: expected {name} at {path}, got {got}; probable cause: the "
            "process has ended, belongs to another user, or runs in another container"
        )

    def synchronize(self) -> None:
        """Do nothing: operations on host memory are complete when they return."""


class CudaIpcBuffer:
    """Device memory from torch's caching allocator, in a segment that does not expand."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._name = uuid.uuid4().hex
        with without_expandable_segments():
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _local_device_tensors[self._name] = self.tensor

    def handle(self) -> bytes:
        """Return a handle for one peer, which keeps the memory until the peer unmaps it."""
        storage: Any = self.tensor.untyped_storage()
        return pickle.dumps((self._name, storage._share_cuda_()))

    def close(self) -> None:
        """Do nothing: the memory is reference-counted."""


class CudaIpcMemory:
    """Memory shared by processes that use one GPU, whatever index it has in each.

    The memory of another GPU is mapped for the process's own one, which needs peer access to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> CudaIpcBuffer:  # noqa: D102
        return CudaIpcBuffer(num_bytes, self._device)

    def open(self, handle: bytes) -> torch.Tensor:  # noqa: D102
        name, (_, *ipc_handle) = pickle.loads(handle)
        local_tensor = _local_device_tensors.get(name)
        if local_tensor is not None:
            return local_tensor
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *ipc_handle)
        flat = torch.empty(0, dtype=torch.uint8, device=self._device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Let torch's allocator use no expandable segment, whose memory has no CUDA IPC handle.

    The allocator then also passes over free blocks of the segments that it has. Setting an option
    resets those that are not named, so all of them are set.
    """
    settings: str = torch._C._accelerator_getAllocatorSettings()  # type: ignore[attr-defined]
    fixed, num_changes = re.subn(r"(?i)(expandable_segments\s*:\s*)\w+", r"\g<1>False", settings)
    if not num_changes:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(fixed)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)  # type: ignore[attr-defined]


def _map_file(descriptor: int) -> torch.Tensor:
    """Map a file as a tensor, which keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
