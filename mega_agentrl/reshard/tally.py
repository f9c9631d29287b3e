"""Digests of what is being copied, in the same pass over memory.

A tally belongs to one rank and knows its spans: rectangles of Hugging Face tensors and where in
the rank's parameters they are, by the rank's own layout. Parameters are written (or read) piece
by piece; a piece inside one span adds its digest to the span's while its values pass through
the processor. Nothing of a plan enters but the order.

A span counts where its pieces covered it exactly, none upon another. Any other (written twice,
or by a copy that changes the type) has no digest here, and its owner takes it from memory.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.delivery import inside
from mega_agentrl.reshard.digest import DigestingCopy
from mega_agentrl.reshard.weigh import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.delivery import Place
    from mega_agentrl.reshard.layout import Rect


class Span(NamedTuple):
    """`local_rect` of parameter `param` is `hf_rect` of a tensor."""

    param: str
    local_rect: Rect
    hf_rect: Rect


class Tally:
    """One rank's; spans are called by their numbers."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._of_param: dict[str, list[int]] = {}
        for number, span in enumerate(spans):
            self._of_param.setdefault(span.param, []).append(number)
        self._ways: dict[Place, tuple[list[int], DigestingCopy | None]] = {}
        """By place: the spans it touches and, where it is all inside one, how to count it."""
        self._sums = np.zeros((len(spans), 2), dtype=np.uint32)
        self._sums_at = self._sums.ctypes.data
        self._covering: list[list[Rect] | None] = [None] * len(spans)
        """Pieces that were found to cover the span the last time; mostly they are the same."""
        self.clear()
        if not torch.cuda.is_available():
            kernel()  # compiled now, as a rank joins, and not within its first update

    def clear(self) -> None:
        """Start anew."""
        self._sums[:] = 0
        self._pieces: list[list[Rect] | None] = [[] for _ in self._spans]
        """Local rectangles that are in the sum; None where there is none to be had."""

    def copy(self, place: Place, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `to`, of the same number of elements, and count them.

        place: the parameter's rectangle that is written or read.
        """
        way = self._ways.get(place)
        if way is None:
            way = self._ways[place] = self._find(place)
        numbers, digesting = way
        if digesting is not None:
            pieces = self._pieces[numbers[0]]
            sums_at = self._sums_at + 8 * numbers[0]
            if pieces is not None and digesting.copy(to, values, sums_at):
                pieces.append(place.rect)
                return
        to.copy_(values.view(to.shape))
        for number in numbers:
            self._pieces[number] = None

    def digest_of(self, number: int) -> np.ndarray | None:
        """[2] uint32; None where it must be taken from memory."""
        pieces = self._pieces[number]
        if pieces is None or not (pieces == self._covering[number] or self._covers(number, pieces)):
            return None
        self._covering[number] = pieces
        found: np.ndarray = self._sums[number]
        return found

    def _covers(self, number: int, pieces: list[Rect]) -> bool:
        """Whether the pieces, which lie inside the span, are all of it, none upon another."""
        covered = sum(piece.numel for piece in pieces)
        return covered == self._spans[number].local_rect.numel and all(
            one.intersect(other) is None for one, other in combinations(pieces, 2)
        )

    def _find(self, place: Place) -> tuple[list[int], DigestingCopy | None]:
        common = {n: self._spans[n].local_rect.intersect(place.rect) for n in self._of(place.param)}
        numbers = [number for number, rect in common.items() if rect is not None]
        if len(numbers) != 1 or common[numbers[0]] != place.rect:
            return numbers, None
        span = self._spans[numbers[0]]
        return numbers, DigestingCopy(inside(place.rect, span.local_rect, span.hf_rect))

    def _of(self, param: str) -> list[int]:
        return self._of_param.get(param, [])
