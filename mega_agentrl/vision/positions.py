"""Positions of tokens along time, height and width (multimodal rotary embedding, M-RoPE).

A text token has the same position on all three axes. With n the position after the last token
before an image, the feature at (t, r, c) of the image's merged grid has (n + t, n + r, n + c), and
the text after the image goes on at n plus the larger of the grid's height and width (Qwen2-VL,
arXiv 2409.12191, section 2.1). The position of a token depends only on the tokens before it, so
that the tokens that rows share have the same positions in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mega_agentrl.types.images import PlacedImage


def rotary_positions(num_tokens: int, images: Sequence[PlacedImage]) -> np.ndarray:
    """Return `[3, num_tokens]` int64, each token's position along time, height and width.

    Args:
        num_tokens: Length of the sequence; an image may be cut off by its end.
        images: The images of the sequence, in order.
    """
    positions: list[np.ndarray] = []
    index = position = 0
    for placed in images:
        text = np.arange(position, position + placed.start - index)
        positions += [np.broadcast_to(text, (3, len(text)))]
        position += len(text)
        frames, rows, columns = placed.image.grid_thw
        merged = (frames, rows // placed.image.merge_size, columns // placed.image.merge_size)
        positions.append(np.indices(merged).reshape(3, -1) + position)
        position += placed.image.num_positions
        index = placed.stop
    text = np.arange(position, position + max(0, num_tokens - index))
    positions.append(np.broadcast_to(text, (3, len(text))))
    found: np.ndarray = np.concatenate(positions, axis=1)[:, :num_tokens]
    return found.astype(np.int64)
