"""The frozen reference weights: a copy in host memory that is swapped in for a forward pass.

Values are swapped in chunks, so the device holds only one chunk more than the weights, and the
parameters keep their storage, so that views of it (Megatron's buffers, the shards of the
distributed optimizer) stay valid. Master weights and moments are not swapped: no optimizer step
may be taken meanwhile.

With CUDA the host memory is pinned, in blocks of a power of two bytes, because pinned
allocations are rounded up to one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ReferenceWeights:
    """A copy of `parameters`, taken at creation and at every `snapshot`.

    `block_bytes` is the largest size of a host block, and so of a swapped chunk.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, block_bytes: int = 2**28) -> None:
        self._parameters = list(parameters)
        self._host_blocks: list[torch.Tensor] = []
        missing = sum(weight.numel() * weight.element_size() for weight in self._parameters)
        while missing > 0:
            size = min(block_bytes, 1 << (missing - 1).bit_length())
            block = torch.empty(size, dtype=torch.uint8, pin_memory=device.has_cuda())
            self._host_blocks.append(block)
            missing -= size
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
            staged = parameter_chunk.clone()
            parameter_chunk.copy_(host_chunk)
            host_chunk.copy_(staged)

    def _iter_chunk_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield equally long (bytes of a parameter, bytes of a host block), in order."""
        blocks = iter(self._host_blocks)
        room = torch.empty(0, dtype=torch.uint8)
        for parameter in self._parameters:
            rest = parameter.detach().view(-1).view(torch.uint8)
            while rest.numel():
                if not room.numel():
                    room = next(blocks)
                size = min(rest.numel(), room.numel())
                yield rest[:size], room[:size]
                rest, room = rest[size:], room[size:]
