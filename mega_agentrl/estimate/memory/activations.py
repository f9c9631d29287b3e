"""Estimates the bytes of the activations and temporary tensors of a policy rank's training pass.

Without recomputation the tensors that each operation saves for the backward pass add up. The hidden
size is h, the tensor-parallel size t; h' = h/t under sequence parallelism, else h' = h; f is the
local inner width of the MLP, k the number of experts per token. Per token a layer saves, in
elements,

    two norms         input, normalised input and output                       3 h' each
    attention         the fused q/k/v, their normalised and rotated copies, and the output
    MLP               inner products before and after the activation           3 f
    experts           the inner products and the input of every copy of a token that is routed to
                      the rank's experts: k copies of 3 f and h, times the routing imbalance

GPUs run fused kernels for norms, activations and variable-length attention. Without these kernels a
norm keeps a float32 copy, the activation of the MLP two more products, and the attention gathered
copies. Megatron's own layers are counted; those of Transformer Engine keep slightly less. A
pipeline stage keeps the activations of several micro-batches at once (`num_in_flight_passes`).

With `parallel.recompute` (arXiv 2205.05198, section 5; "selective" there means the scores of the
attention, which are never kept here) a layer saves

    selective         norms and attention as above, nothing of MLP or experts
    full              its input, h'; each chunk of layers also saves the rotary angles

The backward pass of one layer then computes the other tensors again (`recomputed_layer_bytes`).

Where trajectories are packed as trees (`batch.trees`), the attention gathers keys and values along
the path of every branch, for one layer at a time (`path_attention_bytes`), by indices that a
micro-batch keeps (`attention_plan_bytes`). Without fused kernels the attention computes padded
blocks of branches, with a bias that masks the keys that are not on the path of a query.

The losses see rows, padded to the longest response (`row_tensor_bytes`). The vocabulary-parallel
head computes logits in tiles, in a scratch buffer of fixed size (`actor.vocab.tiling`). For N
tokens, D = h, V words of the vocabulary and B vocabulary rows in a tile it also needs

    gradient of the hidden states   [N, D] float32, and a copy in the training dtype
    gradient of a block             [B, D] float32, for the vocabulary rows of one tile
    gradient of the weight          [V/t, D] in the training dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import split_layers
from mega_agentrl.config.enums import Recompute
from mega_agentrl.reshard.mapping.model_mapping import padded_vocab_size

if TYPE_CHECKING:
    from mega_agentrl.config.sections.policy import ParallelConfig
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_FLOAT_BYTES = 4
_INT_BYTES = 8
SCRATCH_BYTES = {True: 512 << 20, False: 16 << 20}
"""Upper bound on the bytes of the logit tiles, with and without fused kernels."""
_MAX_CHUNK_TOKENS, _MIN_BLOCK_ROWS = 8192, 16384
"""Tokens and vocabulary rows that bound a tile of the fused kernel."""
_CPU_BLOCK_ROWS = 2048
"""Vocabulary rows of a tile on a CPU."""
_BLOCK_PADDING = 1.5
"""Number of slots or scores, padding included, of a padded block of branches for each slot or score
that is used (`attention_plan.group_by_size`)."""
_LOSS_TENSORS = 22
"""Number of float32 tensors [rows, positions] at the peak of objective and backward pass, measured
with KL and entropy terms for every loss of this project."""
_ROW_INDICES = 3
"""Number of int64 indices that a micro-batch keeps for each row and position: those of predicted
token, row and column (`actor.training.packing.MicroBatch`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Properties of the kernels that determine which activations are saved."""

    item_bytes: int = 2
    """Bytes of one weight or activation."""
    fused: bool = True
    """Whether norms, activations and attention are fused, as on GPUs."""
    max_path_tokens: int = 0
    """Tokens of the longest path of a tree with forks; 0 where no tree has a fork."""


def stage_activation_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    stage: int,
    tokens: int,
    kernels: KernelConfig,
    *,
    num_micro_batches: int,
    imbalance: float = 1.0,
) -> float:
    """Return the peak activation bytes on a rank of a pipeline stage.

    Args:
        shape: The model.
        layout: The parallel sizes.
        stage: The pipeline stage.
        tokens: Number of tokens of a micro-batch on this rank.
        kernels: Properties of the kernels.
        num_micro_batches: Number of micro-batches of an optimizer step, which bounds the number of
            micro-batches between forward and backward pass.
        imbalance: Tokens of the busiest expert rank divided by the mean.
    """
    stages = split_layers(shape.num_layers, layout.pipeline * layout.virtual_pipeline)
    total, last_stage = 0.0, layout.pipeline - 1
    passes = num_in_flight_passes(layout, stage, num_micro_batches)
    for chunk in range(layout.virtual_pipeline):
        saved = sum(
            layer_activation_bytes(shape, layout, tokens, kernels, layer, imbalance=imbalance)
            for layer in stages[chunk * layout.pipeline + stage]
        )
        if layout.recompute is Recompute.full:
            saved += tokens * shape.head_dim * _FLOAT_BYTES  # rotary angles
        if stage == last_stage and chunk == layout.virtual_pipeline - 1:
            saved += _norm_bytes(
                shape.hidden_size, tokens / _sequence_parallel_size(layout), kernels
            )
            saved += tokens * shape.hidden_size * kernels.item_bytes  # input of the head
        else:
            saved += _layer_input_bytes(shape, layout, tokens, kernels)  # of the next chunk
        total += saved * passes[chunk]
    return total


def num_in_flight_passes(layout: ParallelConfig, stage: int, num_micro_batches: int) -> list[int]:
    """Return the maximum number of micro-batches between forward and backward pass, by model chunk.

    In the plain 1F1B schedule it is the number of stages from this one to the last. In the
    interleaved schedule a rank runs 2 * (number of later stages) + (virtual - 1) * stages + 1
    forward passes before the first backward pass; it cycles through its chunks and runs as many
    passes of each as there are stages.
    """
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    if virtual == 1:
        return [min(pipeline - stage, num_micro_batches)]
    ahead = min(
        2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1, num_micro_batches * virtual
    )
    rounds = [0] * virtual
    for number in range(ahead):
        rounds[number // pipeline % virtual] += 1
    return rounds


def layer_activation_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: KernelConfig,
    layer: int,
    *,
    imbalance: float = 1.0,
) -> float:
    """Return the bytes that one layer saves for one micro-batch, its output not included."""
    outer, inner = _layer_parts(shape, layout, tokens, kernels, layer, imbalance)
    match layout.recompute:
        case Recompute.none:
            return outer + inner
        case Recompute.selective:
            return outer
        case Recompute.full:
            return _layer_input_bytes(shape, layout, tokens, kernels)


def recomputed_layer_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: KernelConfig,
    *,
    imbalance: float = 1.0,
) -> float:
    """Return the bytes of the activations that a backward pass computes again for one layer.

    The result is that of the layer with the most such bytes.
    """
    kinds = {shape.is_moe_layer(layer): layer for layer in range(shape.num_layers)}
    parts = [
        _layer_parts(shape, layout, tokens, kernels, layer, imbalance) for layer in kinds.values()
    ]
    match layout.recompute:
        case Recompute.none:
            return 0.0
        case Recompute.selective:
            return max(inner for _, inner in parts)
        case Recompute.full:
            saved = _layer_input_bytes(shape, layout, tokens, kernels)
            return max(outer + inner for outer, inner in parts) - saved


def _layer_parts(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: KernelConfig,
    layer: int,
    imbalance: float,
) -> tuple[float, float]:
    """Return the bytes that norms and attention save, and those that the MLP or experts save."""
    local_tokens = tokens / _sequence_parallel_size(layout)
    outer = _attention_bytes(shape, layout, tokens, kernels) + 2 * (
        _norm_bytes(shape.hidden_size, local_tokens, kernels)
        + local_tokens * shape.hidden_size * kernels.item_bytes
    )
    if shape.is_moe_layer(layer):
        return outer, _expert_bytes(shape, layout, local_tokens, kernels, imbalance)
    inner = shape.ffn_hidden_size / layout.tensor
    return outer, (3 if kernels.fused else 5) * inner * tokens * kernels.item_bytes


def _layer_input_bytes(
    shape: ModelShape, layout: ParallelConfig, tokens: float, kernels: KernelConfig
) -> float:
    return tokens / _sequence_parallel_size(layout) * shape.hidden_size * kernels.item_bytes


def _sequence_parallel_size(layout: ParallelConfig) -> int:
    """Return the number of ranks over which tokens are split outside the linears."""
    return layout.tensor if layout.sequence_parallel else 1


def _norm_bytes(width: float, rows: float, kernels: KernelConfig, heads: float = 1) -> float:
    """Return the bytes of a norm's input, normalised input and float32 scale.

    Args:
        width: Number of elements of a row.
        rows: Number of rows, such as tokens.
        kernels: Properties of the kernels; unfused ones keep the input in float32.
        heads: Number of vectors in a row, each of which has a scale.
    """
    input_bytes = kernels.item_bytes if kernels.fused else _FLOAT_BYTES
    return rows * (width * (input_bytes + kernels.item_bytes) + heads * _FLOAT_BYTES)


def _attention_bytes(
    shape: ModelShape, layout: ParallelConfig, tokens: float, kernels: KernelConfig
) -> float:
    """Return the bytes that the attention of one layer saves."""
    heads = shape.num_heads / layout.tensor
    kv_heads = max(1.0, shape.num_kv_heads / layout.tensor)
    query, key = heads * shape.head_dim, kv_heads * shape.head_dim
    # A context rank gathers the keys for both of its chunks: (2C + 1) / 2 times its own.
    key_factor = layout.context + 0.5 if layout.context > 1 else 1.0
    item = kernels.item_bytes
    saved = 4 * tokens * shape.head_dim * item  # rotary cosines and sines, for queries and keys
    if shape.qk_norm:
        saved += _norm_bytes(query, tokens, kernels, heads) + _norm_bytes(
            key, tokens, kernels, kv_heads
        )
    saved += tokens * (query + key_factor * key) * item  # inputs of the attention
    saved += tokens * (query * item + heads * _FLOAT_BYTES)  # output and softmax normaliser
    if not kernels.fused:
        saved += tokens * (key_factor * key + query) * item  # values, and the output transposed
        if kernels.max_path_tokens:
            # Padded slots of queries, outputs and softmax normalisers.
            saved += (_BLOCK_PADDING - 1) * tokens * (2 * query * item + heads * _FLOAT_BYTES)
        if shape.qk_norm and item == _FLOAT_BYTES:  # the key norm saves a view of the fused qkv
            saved += tokens * (query + key) * item
        return saved
    if layout.context > 1:
        return saved + tokens * key_factor * key * item
    if layout.tensor > shape.num_kv_heads:  # values are a view of the gathered qkv
        width = shape.num_heads + 2 * shape.num_kv_heads
        return saved + tokens * width * shape.head_dim * item
    normalized_key = key if shape.qk_norm else 0.0  # the key norm saves a view, too
    return saved + tokens * (query + 2 * key - normalized_key) * item


def _expert_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: KernelConfig,
    imbalance: float,
) -> float:
    """Return the bytes that the router and the experts of one layer save."""
    moe = shape.moe
    assert moe is not None, "an MoE layer has experts"
    router_bytes = tokens * (
        moe.num_experts * (_FLOAT_BYTES + 1) + moe.top_k * (2 * _INT_BYTES + _FLOAT_BYTES)
    )
    tensor_size = layout.expert_tensor_size
    copies = tokens * moe.top_k * tensor_size * imbalance
    inner = moe.ffn_hidden_size / tensor_size * (3 if kernels.fused else 5)
    weight_and_indices = _FLOAT_BYTES + _INT_BYTES * (1 if tensor_size == 1 else 2)
    copy_bytes = (shape.hidden_size + inner) * kernels.item_bytes + weight_and_indices
    return router_bytes + copies * copy_bytes


def layer_backward_workspace_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: KernelConfig,
    *,
    imbalance: float = 1.0,
) -> float:
    """Return the temporary bytes of one layer's backward pass.

    These are the gradients of the MLP's inner products and of its input, and under sequence
    parallelism the gathered input. Experts also need the stacked first weights of all experts of
    the rank and their gradient (`actor.model.grouped_experts`).
    """
    num_inputs = 2 if layout.sequence_parallel else 1
    dense = tokens * (3 * shape.ffn_hidden_size / layout.tensor + num_inputs * shape.hidden_size)
    if shape.moe is None:
        return dense * kernels.item_bytes
    copies = (
        tokens
        / _sequence_parallel_size(layout)
        * shape.moe.top_k
        * layout.expert_tensor_size
        * imbalance
    )
    sparse = copies * (
        3 * shape.moe.ffn_hidden_size / layout.expert_tensor_size + 2 * shape.hidden_size
    )
    stacked_weights = shape.moe.num_experts / layout.expert * 2 * shape.moe.ffn_hidden_size
    sparse += 2 * stacked_weights / layout.expert_tensor_size * shape.hidden_size
    if all(shape.moe.moe_layer_pattern):
        return sparse * kernels.item_bytes
    return max(dense, sparse) * kernels.item_bytes


def path_attention_bytes(
    shape: ModelShape, layout: ParallelConfig, tokens: float, num_keys: int, kernels: KernelConfig
) -> float:
    """Return the temporary bytes of one layer's attention along the paths of trees.

    The backward pass gathers keys and values again and computes their gradients. Where several
    query heads share a key head, the fused kernel first computes these gradients for each query
    head.

    Args:
        shape: The model.
        layout: The parallel sizes.
        tokens: Number of tokens of a micro-batch on this rank.
        num_keys: Number of keys that are gathered along the paths; 0 if no keys are gathered.
        kernels: Properties of the kernels.
    """
    if not num_keys:
        return 0.0
    heads, kv_heads = shape.num_heads / layout.tensor, max(1.0, shape.num_kv_heads / layout.tensor)
    heads_per_slot = 4 * kv_heads
    if kernels.fused and heads != kv_heads:
        heads_per_slot += 2 * heads
    slots = num_keys if kernels.fused else _BLOCK_PADDING * num_keys
    # The gradients are added up for the keys and values of all context ranks.
    summed_gradients = 2 * kv_heads * tokens * layout.context
    return (slots * heads_per_slot + summed_gradients) * shape.head_dim * kernels.item_bytes


def attention_plan_bytes(tokens: float, num_keys: int, kernels: KernelConfig) -> float:
    """Return the bytes of the indices and biases by which a micro-batch attends along paths."""
    if not num_keys:
        return 0.0
    if kernels.fused:
        return num_keys * _INT_BYTES
    slots = _BLOCK_PADDING * num_keys + (_BLOCK_PADDING + 1) * tokens
    num_scores = _BLOCK_PADDING * tokens * kernels.max_path_tokens
    return slots * _INT_BYTES + num_scores * kernels.item_bytes


def row_tensor_bytes(num_rows: int, num_positions: int, *, has_loss: bool) -> int:
    """Return the bytes of the [rows, positions] tensors of a micro-batch and of its indices.

    Args:
        num_rows: Number of rows of the micro-batch, which may be all rows of a data rank.
        num_positions: Number of tokens of the longest response.
        has_loss: Whether the rank belongs to the last pipeline stage, which computes the loss.
    """
    position_bytes = _ROW_INDICES * _INT_BYTES + (_LOSS_TENSORS * _FLOAT_BYTES if has_loss else 0)
    return num_rows * num_positions * position_bytes


def head_workspace_bytes(
    shape: ModelShape, tensor_size: int, tokens: int, kernels: KernelConfig
) -> int:
    """Return the bytes of the vocabulary head's workspace on a rank of the last stage.

    Args:
        shape: The model.
        tensor_size: Number of tensor-parallel ranks, over which the vocabulary is split.
        tokens: Number of tokens of a micro-batch on this rank.
        kernels: Properties of the kernels.
    """
    rows = padded_vocab_size(shape, tensor_size) // tensor_size
    block_rows, scratch_bytes = _tile_size(rows, tokens, kernels)
    hidden_gradient = tokens * shape.hidden_size * (_FLOAT_BYTES + kernels.item_bytes)
    is_float32 = kernels.item_bytes == _FLOAT_BYTES
    block_gradient = 0 if is_float32 else block_rows * shape.hidden_size * _FLOAT_BYTES
    weight_gradient = rows * shape.hidden_size * kernels.item_bytes
    return scratch_bytes + hidden_gradient + block_gradient + weight_gradient


def _tile_size(rows: int, tokens: int, kernels: KernelConfig) -> tuple[int, int]:
    """Return the vocabulary rows of a tile and the bytes of the scratch buffer.

    Args:
        rows: Number of vocabulary rows of this rank.
        tokens: Number of tokens of a micro-batch on this rank.
        kernels: Properties of the kernels.
    """
    bound, item_bytes = SCRATCH_BYTES[kernels.fused], kernels.item_bytes
    if kernels.fused:
        min_rows = max(1, min(rows, _MIN_BLOCK_ROWS))
        chunk_tokens = max(1, min(tokens, _MAX_CHUNK_TOKENS, bound // (min_rows * item_bytes)))
        max_rows = max(1, bound // (chunk_tokens * item_bytes))
        block_rows = min(rows, max_rows - max_rows % _MIN_BLOCK_ROWS or max_rows)
        return block_rows, chunk_tokens * block_rows * item_bytes
    num_logits = max(1, bound // (2 * _FLOAT_BYTES))
    block_rows = max(1, min(rows, _CPU_BLOCK_ROWS, isqrt(2 * num_logits)))
    chunk_tokens = min(tokens, max(1, num_logits // block_rows))
    return block_rows, 2 * chunk_tokens * block_rows * _FLOAT_BYTES
