"""A frozen copy of a rank's weights in host memory, put in their place for a pass.

Exchanged by value, piece by piece: the device holds one piece more than the weights, whatever
their number, and parameters keep their storage, so that views of it (Megatron's buffers, the
distributed optimizer's shares) stay right. Masters and moments know nothing of it: no step may
be taken while the copy is in place.

Host memory is pinned where CUDA is, in blocks of a power of two bytes, because pinned
allocations are rounded up to one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Reference:
    """Weights as they were at the last `freeze`; at first as they are now.

    parameters: what is copied and exchanged. block_bytes: most that one piece holds.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, block_bytes: int = 2**28) -> None:
        self._parameters = list(parameters)
        self._blocks: list[torch.Tensor] = []
        missing = sum(weight.numel() * weight.element_size() for weight in self._parameters)
        while missing > 0:
            size = min(block_bytes, 1 << (missing - 1).bit_length())
            block = torch.empty(size, dtype=torch.uint8, pin_memory=device.has_cuda())
            self._blocks.append(block)
            missing -= size
        self.freeze()

    def freeze(self) -> None:
        """Take the present weights instead of the kept ones."""
        for there, here in self._pieces():
            here.copy_(there)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold the kept weights inside and the present ones again after."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for there, here in self._pieces():
            staged = there.clone()
            there.copy_(here)
            here.copy_(staged)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a parameter, bytes of a block) of the same length, all in a row."""
        blocks = iter(self._blocks)
        room = torch.empty(0, dtype=torch.uint8)
        for parameter in self._parameters:
            rest = parameter.detach().view(-1).view(torch.uint8)
            while rest.numel():
                if not room.numel():
                    room = next(blocks)
                size = min(rest.numel(), room.numel())
                yield rest[:size], room[:size]
                rest, room = rest[size:], room[size:]
