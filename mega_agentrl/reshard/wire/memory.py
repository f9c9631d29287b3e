"""Memory that another process of the same machine, or of the same GPU, can map.

    owner                                   peer
    block = memory.allocate(num_bytes)      tensor = memory.open(handle)
    handle = block.handle()    -> ...       ... tensor shares the memory ...

Host memory is a memfd: it has no name in any file system and no limit but the machine's, and it
is gone with the last process that has it, however that process ended. A peer finds it as
/proc/<owner>/fd/<number>, so both must see the same processes and run as the same user. Device
memory is shared by CUDA IPC; torch counts its users, so each peer needs a handle of its own and
what a killed peer had mapped stays allocated until its owner ends.

A mapping lasts as long as a tensor on it; nothing is unmapped below a reader.
"""

from __future__ import annotations

import mmap
import os
import pickle
import uuid
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_own_device_memory: MutableMapping[str, torch.Tensor] = WeakValueDictionary()
"""CUDA refuses to map a process's own memory: threads of one process find it here."""


class Block(Protocol):
    """A piece of memory of this process. whole: flat uint8."""

    whole: torch.Tensor

    def handle(self) -> bytes:
        """What one more peer needs to map it."""

    def close(self) -> None:
        """No more peers will map it."""


class Memory(Protocol):
    """One kind of memory."""

    def allocate(self, num_bytes: int) -> Block:
        """New memory, values undefined."""

    def open(self, handle: bytes) -> torch.Tensor:
        """The memory of a peer, flat uint8; raises `RuntimeError` where it cannot be mapped."""

    def settle(self) -> None:
        """Until all that this thread has written or read is written or read."""


class HostBlock:
    """Zero pages that take no room until they are touched."""

    def __init__(self, num_bytes: int) -> None:
        self._name = f"reshard-{uuid.uuid4().hex}"
        self._file = os.fdopen(os.memfd_create(self._name), "r+b", buffering=0)
        self._file.truncate(num_bytes)
        self.whole = _mapped(self._file.fileno())

    def handle(self) -> bytes:
        """See `Block.handle`."""
        return f"{os.getpid()} {self._file.fileno()} {self._name}".encode()

    def close(self) -> None:
        """See `Block.close`."""
        self._file.close()


class HostMemory:
    """Of processes of one machine."""

    def allocate(self, num_bytes: int) -> HostBlock:
        """See `Memory.allocate`."""
        return HostBlock(num_bytes)

    def open(self, handle: bytes) -> torch.Tensor:
        """See `Memory.open`."""
        pid, number, name = handle.decode().split()
        path = f"/proc/{pid}/fd/{number}"
        try:
            with open(path, "r+b", buffering=0) as file:
                got = os.readlink(f"/proc/self/fd/{file.fileno()}")
                if name in got:
                    return _mapped(file.fileno())
        except OSError as error:
            got = str(error)
        raise RuntimeError(
            f"memory of process {pid}: expected {name} at {path}, got {got}; the process has "
            "ended, is of another user, or is in another container of this machine"
        )

    def settle(self) -> None:
        """Nothing: memory of the host is written when the operation returns."""


class DeviceBlock:
    """Of torch's caching allocator."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._name = uuid.uuid4().hex
        self.whole = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _own_device_memory[self._name] = self.whole

    def handle(self) -> bytes:
        """See `Block.handle`; allocates a reference that the peer gives back."""
        storage: Any = self.whole.untyped_storage()
        return pickle.dumps((self._name, storage._share_cuda_()))

    def close(self) -> None:
        """Nothing: references count."""


class DeviceMemory:
    """Of processes that use one GPU, whatever number it has in each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> DeviceBlock:
        """See `Memory.allocate`."""
        return DeviceBlock(num_bytes, self._device)

    def open(self, handle: bytes) -> torch.Tensor:
        """See `Memory.open`."""
        name, (_, *shared) = pickle.loads(handle)
        own = _own_device_memory.get(name)
        if own is not None:
            return own
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *shared)
        flat = torch.empty(0, dtype=torch.uint8, device=self._device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]

    def settle(self) -> None:
        """Waits for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()


def _mapped(descriptor: int) -> torch.Tensor:
    """A file as a tensor, which keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
