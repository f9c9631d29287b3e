"""Estimates the bytes that a vision tower keeps for the backward pass of a policy rank.

With h the tower's width and f the inner width of its MLP, a block saves for each patch, in elements
of the training dtype unless it says float32,

    two norms    Qwen2.5-VL: input in float32, quotient and output, h each; Qwen3-VL: input and
                 output, h each
    attention    queries, keys, values, output, and the output before its heads are joined: 5 h
    MLP          Qwen2.5-VL: gate before and after the activation, up, product: 4 f; Qwen3-VL:
                 before and after the activation: 2 f

or, with `parallel.recompute=full`, its input alone, and one block at a time the rest. The patches
are kept in float32 and in the training dtype. A merger saves the output of its norm, of its first
layer and of the activation. A frozen tower saves nothing. Features are kept in the width of the
decoder, once for the embeddings and once for each layer after which some are added.

How many patches a micro-batch has depends on the data, which an estimate does not read: it is
assumed that images fill the prompts, up to `data.max_prompt_tokens` each, and that responses are
text. A tool that answers with images adds to that. A context rank, or a tensor rank under sequence
parallelism, encodes the images whose placeholders are among its tokens; those at their edges are
encoded by several ranks.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Recompute
from mega_agentrl.estimate.memory.micro_batches import max_row_tokens
from mega_agentrl.reshard.mapping.vision_shape import VisionTower

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.mapping.vision_shape import VisionShape

_FLOAT_BYTES = 4


def max_image_tokens(config: TrainConfig, vision: VisionShape, tokens: int) -> int:
    """Return the assumed number of features that a rank computes for a micro-batch.

    Args:
        config: The run.
        vision: The tower.
        tokens: Number of tokens of the micro-batch on one context rank.
    """
    parallel = config.parallel
    all_tokens = tokens * parallel.context
    num_rows = max(1.0, all_tokens / max_row_tokens(config))
    total = min(all_tokens, round(num_rows * config.data.max_prompt_tokens))
    num_parts = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
    if num_parts == 1:
        return total
    # A context rank has two chunks of a row, and a part has two edges.
    num_edges = 2 if parallel.context == 1 else 4
    return min(total, ceil(total / num_parts) + num_edges * _largest_image_tokens(config, vision))


def _largest_image_tokens(config: TrainConfig, vision: VisionShape) -> int:
    limit = config.data.max_prompt_tokens
    if config.data.max_pixels is None:
        return limit
    return min(limit, config.data.max_pixels // (vision.patch_size * vision.merge_size) ** 2)


def vision_activation_bytes(
    vision: VisionShape, image_tokens: int, item_bytes: int, *, recompute: Recompute, frozen: bool
) -> int:
    """Return the bytes that the tower keeps for one micro-batch.

    Args:
        vision: The tower.
        image_tokens: Number of placeholders of the micro-batch.
        item_bytes: Bytes of a weight or activation.
        recompute: Activations that are computed again.
        frozen: Whether the tower is not trained.
    """
    num_features = 1 + len(vision.deepstack_blocks)
    features = image_tokens * vision.out_hidden_size * num_features * item_bytes
    num_patches = image_tokens * vision.merge_size**2
    block = num_patches * vision_block_bytes_per_patch(vision, item_bytes)
    if frozen:
        return features
    outside = num_patches * vision.patch_dim * (item_bytes + _FLOAT_BYTES)
    outside += num_features * image_tokens * 3 * vision.merged_size * item_bytes
    if recompute is not Recompute.full:
        return features + outside + vision.depth * block
    inputs = vision.depth * num_patches * vision.hidden_size * item_bytes
    return features + outside + inputs + block


def vision_block_bytes_per_patch(vision: VisionShape, item_bytes: int) -> int:
    """Return the bytes that one block saves for one patch without recomputation."""
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    if vision.tower is VisionTower.qwen2_5_vl:
        norm = hidden * (_FLOAT_BYTES + 2 * item_bytes)
        return 2 * norm + (5 * hidden + 4 * inner) * item_bytes
    return (2 * 2 * hidden + 5 * hidden + 2 * inner) * item_bytes
