"""Training state in host memory: offloading for shared GPUs, and the frozen reference weights.

The storage of an offloaded tensor is copied to the host and resized to 0, and later resized and
filled again, so that every view of it (parameters in Megatron's buffers, their shards, gradients)
becomes valid again. Gradient buffers are freed and restored as zeros. Without CUDA the same code
runs and frees memory, too.

While a part is on the host, forward passes and optimizer calls that need it raise an error;
reading a parameter is not checked. Model buffers that are not parameters and Adam's step counts
(a few bytes) stay on the device.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor import device
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.training.optimizer import AdamOptimizer

ALL_STATE = frozenset(("weights", "gradients", "optimizer"))
BLOCK_BYTES = 2**28
"""Default size of a block of host memory."""


def require_on_device(what: str, needed: Set[str], on_host: Set[str]) -> None:
    """Raise `ValueError` if a needed part of the state is in host memory.

    Args:
        what: The operation that needs the parts, for the message.
        needed: Parts of `ALL_STATE` that must be on the device.
        on_host: Parts of `ALL_STATE` that are in host memory.
    """
    missing = sorted(needed & on_host)
    if missing:
        raise InputError(
            f"{what}: parts in host memory",
            missing,
            f"none of {sorted(needed)}",
            "no Offloader.to_device() before it",
        )


class HostBlocks:
    """Host memory in blocks of at most `block_bytes`.

    With CUDA it is pinned, and the size of a block is a power of two, because pinned allocations
    are rounded up to one.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[torch.Tensor] = []

    def reserve(self, num_bytes: int) -> None:
        """Allocate blocks until there are `num_bytes` in all."""
        missing = num_bytes - sum(block.numel() for block in self._blocks)
        while missing > 0:
            size = min(self._block_bytes, 1 << (missing - 1).bit_length())
            block = torch.empty(size, dtype=torch.uint8, pin_memory=device.has_cuda())
            self._blocks.append(block)
            missing -= size

    def free(self) -> None:
        """Free all blocks."""
        self._blocks = []

    def iter_chunk_pairs(
        self, byte_views: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield equally long (chunk of a `[n]` uint8 view, chunk of a host block), in order."""
        blocks = iter(self._blocks)
        block_rest = torch.empty(0, dtype=torch.uint8)
        for view_rest in byte_views:
            while view_rest.numel():
                if not block_rest.numel():
                    block_rest = next(blocks)
                size = min(view_rest.numel(), block_rest.numel())
                yield view_rest[:size], block_rest[:size]
                view_rest, block_rest = view_rest[size:], block_rest[size:]


class HostBuffer:
    """Host memory for the storages of a set of tensors.

    With CUDA the blocks are kept for the next time, since pinning is slow.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._host_blocks = HostBlocks(block_bytes)
        self._offloaded_storages: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of the tensors to the host, each once, and free them."""
        assert not self._offloaded_storages, "the host buffer is in use"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._offloaded_storages = [
            (storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()
        ]
        self._host_blocks.reserve(sum(size for _, size in self._offloaded_storages))
        for device_chunk, host_chunk in self._iter_chunk_pairs():
            host_chunk.copy_(device_chunk, non_blocking=True)
        if device.has_cuda():
            torch.cuda.synchronize()
        for storage, _ in self._offloaded_storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again and copy their contents back."""
        for storage, size in self._offloaded_storages:
            storage.resize_(size)
        for device_chunk, host_chunk in self._iter_chunk_pairs():
            device_chunk.copy_(host_chunk, non_blocking=True)
        self._offloaded_storages = []
        if device.has_cuda():
            torch.cuda.synchronize()
        else:
            self._host_blocks.free()

    def _iter_chunk_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._host_blocks.iter_chunk_pairs(
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage, _ in self._offloaded_storages
        )


class ReferenceWeights:
    """The frozen reference: a host copy of `parameters` that is swapped in for a forward pass.

    The copy is taken at creation and at every `snapshot`. Values are swapped in chunks, so the
    device holds only one chunk more than the weights, and the parameters keep their storage, so
    that views of it (Megatron's buffers, the shards of the distributed optimizer) stay valid.
    Master weights and moments are not swapped: no optimizer step may be taken meanwhile.
    `block_bytes` is the largest size of a swapped chunk.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._parameters = list(parameters)
        self._host_blocks = HostBlocks(block_bytes)
        self._host_blocks.reserve(
            sum(weight.numel() * weight.element_size() for weight in self._parameters)
        )
        self.snapshot()

    def snapshot(self) -> None:
        """Replace the copy by the current weights."""
        for parameter_chunk, host_chunk in self._iter_chunk_pairs():
            host_chunk.copy_(parameter_chunk)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the parameters hold the reference weights inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter_chunk, host_chunk in self._iter_chunk_pairs():
            current_weights = parameter_chunk.clone()
            parameter_chunk.copy_(host_chunk)
            host_chunk.copy_(current_weights)

    def _iter_chunk_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._host_blocks.iter_chunk_pairs(
            parameter.detach().view(-1).view(torch.uint8) for parameter in self._parameters
        )


class Offloader:
    """Moves the parts of the training state between device and host.

    A part that is already where it should be is skipped. If the weights are frozen, `optimizer`
    is None and there is no other state.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], optimizer: AdamOptimizer | None
    ) -> None:
        self.on_host: frozenset[str] = frozenset()
        """Parts of `ALL_STATE` that are in host memory."""
        self._chunks = chunks
        self._optimizer = optimizer
        self._weight_buffer = HostBuffer()
        self._optimizer_buffer = HostBuffer()
        self._freed_grad_storages: list[tuple[torch.UntypedStorage, int]] = []
        for chunk in chunks:
            chunk.module.register_forward_pre_hook(self._check_before_forward)

    def keep_on_device(self, parts: Set[str]) -> None:
        """Keep exactly these parts of `ALL_STATE` on the device, the rest on the host."""
        self.to_host(**{name: name not in parts for name in ALL_STATE})
        self.to_device(**{name: name in parts for name in ALL_STATE})

    def to_host(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Move the selected parts to host memory; gradients are dropped."""
        selected = _selected_state(weights, gradients, optimizer) - self.on_host
        if "gradients" in selected:
            self._free_gradients()
        if "optimizer" in selected:
            self._optimizer_buffer.offload(self._optimizer_tensors())
        if "weights" in selected:
            self._weight_buffer.offload(self._weight_tensors())
        self._set_on_host(self.on_host | selected)
        if device.has_cuda():
            # Another process can only use memory that the allocator has returned.
            torch.cuda.empty_cache()

    def to_device(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Move the selected parts back to the device; gradients are 0."""
        selected = _selected_state(weights, gradients, optimizer) & self.on_host
        if "weights" in selected:
            self._weight_buffer.restore()
        if "optimizer" in selected:
            self._optimizer_buffer.restore()
        if "gradients" in selected:
            for storage, size in self._freed_grad_storages:
                storage.resize_(size)
            for buffer in self._grad_buffers():
                buffer.grad_data.zero_()
        self._set_on_host(self.on_host - selected)

    def _set_on_host(self, on_host: frozenset[str]) -> None:
        self.on_host = on_host
        if self._optimizer is not None:
            self._optimizer.on_host = on_host

    def _grad_buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from chunk.module.parameters()

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return master weights and moments, except masters that are the weights themselves."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._weight_tensors()}
        tensors = [] if self._optimizer is None else list(self._optimizer.state_tensors())
        return [t for t in tensors if t.untyped_storage().data_ptr() not in weights]

    def _free_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.release_grads()
        if device.has_cuda():
            torch.cuda.synchronize()
        storages = [buffer.grad_data.untyped_storage() for buffer in self._grad_buffers()]
        self._freed_grad_storages = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def _check_before_forward(self, *_: object) -> None:
        needed = {"weights", "gradients"} if torch.is_grad_enabled() else {"weights"}
        require_on_device("forward pass", needed, self.on_host)


def _selected_state(weights: bool, gradients: bool, optimizer: bool) -> frozenset[str]:
    flags = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return frozenset(name for name, flag in flags.items() if flag)
