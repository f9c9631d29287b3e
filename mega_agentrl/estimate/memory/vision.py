"""Estimates the bytes that a vision tower keeps for the backward pass of a policy rank.

With h the tower's width and f the inner width of its MLP, a block saves for each patch, in elements
of the training dtype unless it says float32,

    two norms    Qwen2.5-VL: input in float32, quotient and output, h each; Qwen3-VL: input and
                 output, h each
    attention    queries, keys, values, output, and the output before its heads are joined: 5 h
    MLP          Qwen2.5-VL: gate before and after the activation, up, product: 4 f; Qwen3-VL:
                 before and after the activation: 2 f

or, with `parallel.recompute=full`, its input alone, and one block at a time the rest. A frozen
tower saves nothing. Features are kept in the width of the decoder, once for the embeddings and
once for each layer after which some are added.

How many patches a micro-batch has depends on the data, which an estimate does not read: it is
assumed that images fill the prompts, up to `data.max_prompt_tokens` each, and that responses are
text. A tool that answers with images adds to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Recompute
from mega_agentrl.estimate.memory.micro_batches import max_row_tokens
from mega_agentrl.reshard.mapping.vision_shape import VisionTower

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.mapping.vision_shape import VisionShape

_FLOAT_BYTES = 4


def max_image_tokens(config: TrainConfig, tokens: int) -> int:
    """Return the largest number of placeholders among the tokens of a micro-batch on one rank."""
    prompts = max(1.0, tokens / max_row_tokens(config)) * config.data.max_prompt_tokens
    return min(tokens, round(prompts))


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
    if recompute is not Recompute.full:
        return features + vision.depth * block
    inputs = vision.depth * num_patches * vision.hidden_size * item_bytes
    return features + inputs + block


def vision_block_bytes_per_patch(vision: VisionShape, item_bytes: int) -> int:
    """Return the bytes that one block saves for one patch without recomputation."""
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    if vision.tower is VisionTower.qwen2_5_vl:
        norm = hidden * (_FLOAT_BYTES + 2 * item_bytes)
        return 2 * norm + (5 * hidden + 4 * inner) * item_bytes
    return (2 * 2 * hidden + 5 * hidden + 2 * inner) * item_bytes
