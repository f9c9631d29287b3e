"""Weights, gradients and optimizer state to host memory and back, for colocation.

A tensor keeps its identity: the storage under it is copied out and resized to nothing, later
resized and filled again, so that every view (parameters in Megatron's buffers, shares of them,
gradients) is valid afterwards without anyone holding it being told. Gradient buffers are freed
and come back as zeros. On a machine without CUDA the same code runs and the memory is really
given back too.

Host memory is pinned where CUDA is, in blocks of a power of two bytes, because pinned
allocations are rounded up to one; the blocks are kept for the next time, since pinning is
slow. While a part is away, forward passes and optimizer calls that need it are errors; reading
a parameter is not watched.

Not moved: buffers that are not parameters, and Adam's step counts, which are a few bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.optimizer import PolicyOptimizer

EVERYTHING = frozenset(("weights", "gradients", "optimizer"))


def require_on_device(what: str, needed: Set[str], on_host: Set[str]) -> None:
    """Raise `ValueError` where a needed part is away."""
    missing = sorted(needed & on_host)
    if missing:
        raise ValueError(
            f"{what}: got {', '.join(missing)} in host memory; expected "
            f"{', '.join(sorted(needed))} on the device; probable cause: no "
            "Offload.to_device() before it"
        )


class HostStore:
    """Host memory for the storages of a set of tensors."""

    def __init__(self, block_bytes: int = 2**28) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[torch.Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages under the tensors here, each once, and free them."""
        assert not self._taken, "the store is full"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._taken = [(found, found.nbytes()) for found in storages.values() if found.nbytes()]
        self._reserve(sum(size for _, size in self._taken))
        for there, here in self._pieces():
            here.copy_(there, non_blocking=True)
        if device.has_cuda():
            torch.cuda.synchronize()
        for storage, _ in self._taken:
            storage.resize_(0)

    def put_back(self) -> None:
        """Give the storages their memory and contents again."""
        for storage, size in self._taken:
            storage.resize_(size)
        for there, here in self._pieces():
            there.copy_(here, non_blocking=True)
        self._taken = []
        if device.has_cuda():
            torch.cuda.synchronize()
        else:
            self._blocks = []

    def _reserve(self, num_bytes: int) -> None:
        missing = num_bytes - sum(block.numel() for block in self._blocks)
        while missing > 0:
            size = min(self._block_bytes, 1 << (missing - 1).bit_length())
            block = torch.empty(size, dtype=torch.uint8, pin_memory=device.has_cuda())
            self._blocks.append(block)
            missing -= size

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a storage, bytes of a block) of the same length, all storages in a row."""
        blocks = iter(self._blocks)
        room = torch.empty(0, dtype=torch.uint8)
        for storage, _ in self._taken:
            rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while rest.numel():
                if not room.numel():
                    room = next(blocks)
                size = min(rest.numel(), room.numel())
                yield rest[:size], room[:size]
                rest, room = rest[size:], room[size:]


class Offload:
    """Moves what training needs of a network, part by part.

    chunks: the model's chunks in their data-parallel wrappers. optimizer: None where the
    weights are frozen; then there is nothing but them. A part that is away already, or here
    already, is passed over.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], optimizer: PolicyOptimizer | None
    ) -> None:
        self.on_host: frozenset[str] = frozenset()
        self._chunks = chunks
        self._optimizer = optimizer
        self._weights = HostStore()
        self._state = HostStore()
        self._gradients: list[tuple[torch.UntypedStorage, int]] = []
        for chunk in chunks:
            chunk.module.register_forward_pre_hook(self._before_forward)

    def to_host(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Move the parts named true to host memory; gradients are dropped."""
        chosen = _chosen(weights, gradients, optimizer) - self.on_host
        if "gradients" in chosen:
            self._drop_gradients()
        if "optimizer" in chosen:
            self._state.take(self._state_tensors())
        if "weights" in chosen:
            self._weights.take(self._weight_tensors())
        self._note(self.on_host | chosen)
        if device.has_cuda():
            # Only memory that the allocator has given back is there for another process.
            torch.cuda.empty_cache()

    def to_device(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Bring the parts named true back; gradients are 0."""
        chosen = _chosen(weights, gradients, optimizer) & self.on_host
        if "weights" in chosen:
            self._weights.put_back()
        if "optimizer" in chosen:
            self._state.put_back()
        if "gradients" in chosen:
            for storage, size in self._gradients:
                storage.resize_(size)
            for buffer in self._buffers():
                buffer.grad_data.zero_()
        self._note(self.on_host - chosen)

    def _note(self, on_host: frozenset[str]) -> None:
        self.on_host = on_host
        if self._optimizer is not None:
            self._optimizer.on_host = on_host

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from chunk.module.parameters()

    def _state_tensors(self) -> list[torch.Tensor]:
        """Masters and moments, without the masters that are the weights themselves."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._weight_tensors()}
        found = [] if self._optimizer is None else list(self._optimizer.tensors())
        return [t for t in found if t.untyped_storage().data_ptr() not in weights]

    def _drop_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.drop_grad()
        if device.has_cuda():
            torch.cuda.synchronize()
        storages = [buffer.grad_data.untyped_storage() for buffer in self._buffers()]
        self._gradients = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def _before_forward(self, *_: object) -> None:
        needed = {"weights", "gradients"} if torch.is_grad_enabled() else {"weights"}
        require_on_device("forward pass", needed, self.on_host)


def _chosen(weights: bool, gradients: bool, optimizer: bool) -> frozenset[str]:
    flags = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return frozenset(name for name, flag in flags.items() if flag)
