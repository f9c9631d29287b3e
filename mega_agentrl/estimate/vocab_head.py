"""Bytes that the language-model head needs at once in its backward pass, and why no more.

Whole logits never exist: tiles of them live in a scratch of a fixed size, beside

    hidden states' gradient   [N, D] float32, and once in the training type
    a block's gradient        [B, D] float32, the vocabulary rows of one tile
    the weight's gradient     [V/t, D] in the training type

The sizes are those of `actor.vocab_tiles`, `vocab_triton` and `vocab_torch`.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from mega_agentrl.reshard.names import padded_vocab

if TYPE_CHECKING:
    from mega_agentrl.estimate.activation import Kernels
    from mega_agentrl.reshard.model_shape import ModelShape

SCRATCH_BYTES = {True: 512 << 20, False: 16 << 20}
"""Bound on tiles of logits, by whether kernels are fused."""
_MAX_CHUNK_TOKENS, _MIN_BLOCK_ROWS = 8192, 16384
_CPU_BLOCK_ROWS = 2048
_FLOAT_BYTES = 4


def head_workspace(shape: ModelShape, tensor_size: int, tokens: int, kernels: Kernels) -> int:
    """Bytes on a rank of the last stage; tokens: of a micro-batch."""
    rows = padded_vocab(shape, tensor_size) // tensor_size
    block, scratch = _tile(rows, tokens, kernels)
    hidden = tokens * shape.hidden * (_FLOAT_BYTES + kernels.item_bytes)
    wide = 0 if kernels.item_bytes == _FLOAT_BYTES else block * shape.hidden * _FLOAT_BYTES
    return scratch + hidden + wide + rows * shape.hidden * kernels.item_bytes


def _tile(rows: int, tokens: int, kernels: Kernels) -> tuple[int, int]:
    """Vocabulary rows of a tile, bytes of the scratch."""
    bound, item = SCRATCH_BYTES[kernels.fused], kernels.item_bytes
    if kernels.fused:
        width = max(1, min(rows, _MIN_BLOCK_ROWS))
        step = max(1, min(tokens, _MAX_CHUNK_TOKENS, bound // (width * item)))
        wide = max(1, bound // (step * item))
        block = min(rows, wide - wide % _MIN_BLOCK_ROWS or wide)
        return block, step * block * item
    elements = max(1, bound // (2 * _FLOAT_BYTES))
    block = max(1, min(rows, _CPU_BLOCK_ROWS, isqrt(2 * elements)))
    step = min(tokens, max(1, elements // block))
    return block, 2 * step * block * _FLOAT_BYTES
