"""Computes the workspace of the vocabulary-parallel head in its backward pass.

The full logits never exist: tiles of them live in a scratch buffer of fixed size, besides

    gradient of the hidden states   [N, D] float32, and once in the training dtype
    gradient of a block             [B, D] float32, for the vocabulary rows of one tile
    gradient of the weight          [V/t, D] in the training dtype

The tile sizes are those of `actor.vocab`.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from mega_agentrl.reshard.mapping.model_mapping import padded_vocab_size

if TYPE_CHECKING:
    from mega_agentrl.estimate.memory.activations import KernelConfig
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

SCRATCH_BYTES = {True: 512 << 20, False: 16 << 20}
"""Upper bound on the bytes of the logit tiles, by whether kernels are fused."""
_MAX_CHUNK_TOKENS, _MIN_BLOCK_ROWS = 8192, 16384
_CPU_BLOCK_ROWS = 2048
_FLOAT_BYTES = 4


def head_workspace_bytes(
    shape: ModelShape, tensor_size: int, tokens: int, kernels: KernelConfig
) -> int:
    """Return the bytes on a rank of the last stage; `tokens` of a micro-batch."""
    rows = padded_vocab_size(shape, tensor_size) // tensor_size
    block, scratch = _tile_size(rows, tokens, kernels)
    hidden = tokens * shape.hidden_size * (_FLOAT_BYTES + kernels.item_bytes)
    wide = 0 if kernels.item_bytes == _FLOAT_BYTES else block * shape.hidden_size * _FLOAT_BYTES
    return scratch + hidden + wide + rows * shape.hidden_size * kernels.item_bytes


def _tile_size(rows: int, tokens: int, kernels: KernelConfig) -> tuple[int, int]:
    """Return the vocabulary rows of a tile and the bytes of the scratch buffer."""
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
