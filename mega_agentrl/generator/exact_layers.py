"""vLLM's layers with `numerics`, so that its log-probs are the policy's bit by bit.

`use_exact_layers` replaces methods of vLLM's classes in a process, before the model is built. The
replaced ones cover the decoders of dense text models on CPUs. Keys and values lie in vLLM's blocks
as plain rows, which only the attention here reads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group

from mega_agentrl.generator.vllm_compat import replace_operations
from mega_agentrl.numerics import layers
from mega_agentrl.numerics.exact_sums import FixedPointRows, exact_matmul
from mega_agentrl.numerics.rotary_frequencies import compute_inv_freq
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    import torch.distributed as dist
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

_PACKED_WEIGHT = "exact_weight"
"""Attribute of a layer with its `FixedPointRows`; None until the first pass after an update."""


def use_exact_layers(model_folder: str) -> None:
    """Replace vLLM's operations in this process.

    Args:
        model_folder: Folder of the model, for its rotary embedding.
    """
    shape = ModelShape.from_folder(model_folder)
    inv_freq = compute_inv_freq(shape.head_dim, shape.rope)

    def rotate(
        _: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.outer(positions.float(), inv_freq)
        query_heads, key_heads = (
            layers.rotate(
                value.unflatten(-1, (-1, shape.head_dim)), angle, shape.rope.attention_factor
            )
            for value in (query, key)
        )
        return query_heads.flatten(1), key_heads.flatten(1)

    replace_operations(
        linear=_apply_linear,
        process_weights=_drop_packed_weight,
        row_parallel=_forward_row_parallel,
        norm=_forward_norm,
        activation=_forward_activation,
        rotation=rotate,
        store_keys_and_values=_store_keys_and_values,
        attention=_forward_attention,
        log_probs=_compute_log_probs,
    )


def _drop_packed_weight(_: Any, layer: torch.nn.Module) -> None:
    setattr(layer, _PACKED_WEIGHT, None)


def _packed_weight(layer: Any, group: dist.ProcessGroup | None = None) -> FixedPointRows:
    """Return the layer's weight; all ranks of the group call this for the same layer."""
    packed: FixedPointRows | None = getattr(layer, _PACKED_WEIGHT)
    if packed is None:
        packed = FixedPointRows.from_rows(layer.weight.detach(), group)
        setattr(layer, _PACKED_WEIGHT, packed)
    return packed


def _apply_linear(
    _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    output = exact_matmul(x, _packed_weight(layer), num_terms=x.size(-1)).to(x.dtype)
    return output if bias is None else output + bias


def _forward_row_parallel(layer: Any, x: torch.Tensor) -> Any:
    assert layer.input_is_parallel, "the inputs of decoders are split by the layer before"
    assert layer.reduce_results, "only layers with experts reduce later"
    group = get_tp_group().cpu_group if layer.tp_size > 1 else None
    weight = _packed_weight(layer, group)
    output = exact_matmul(x, weight, num_terms=layer.input_size, group=group).to(x.dtype)
    if layer.bias is not None and not layer.skip_bias_add:
        output = output + layer.bias
    if not layer.return_bias:
        return output
    return output, layer.bias if layer.skip_bias_add else None


def _forward_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Normalise x, or the sum with the residual, which is then returned, too."""
    total = x if residual is None else x + residual
    normed = layers.rms_norm(total, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, total)


def _forward_activation(_: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return layers.silu(gate) * up


def _compute_log_probs(logits_NV: torch.Tensor) -> torch.Tensor:
    return layers.log_probs_and_entropy(logits_NV)[0].to(torch.float32)


def _key_and_value_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `[blocks, Hkv, block size, 2 D]` into two `[blocks, Hkv, block size, D]`."""
    return kv_cache.chunk(2, dim=-1)


def _store_keys_and_values(
    _: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write `[N, Hkv, D]` keys and values to the slots of their tokens."""
    slots = slot_mapping[: len(key)]
    block, offset = slots // kv_cache.size(2), slots % kv_cache.size(2)
    for cache, new in zip(_key_and_value_cache(kv_cache), (key, value), strict=True):
        cache[block, :, offset] = new[: len(slots)]


def _forward_attention(
    _: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: CPUAttentionMetadata | None,
    output: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Write the attention of `[N, H, D]` queries to their cached keys into `output`."""
    if attn_metadata is None:  # the pass that measures memory
        return output
    starts = attn_metadata.query_start_loc.tolist()
    single = [n for n, (start, stop) in enumerate(pairwise(starts)) if stop == start + 1]
    longer = [[n] for n, (start, stop) in enumerate(pairwise(starts)) if stop > start + 1]
    for requests in filter(None, (single, *longer)):
        first, last = starts[requests[0]], starts[requests[0] + 1]
        tokens = torch.tensor([range(starts[n], starts[n] + last - first) for n in requests])
        output[tokens] = _attend(query[tokens], requests, kv_cache, attn_metadata)
    return output


def _attend(
    query_RQHD: torch.Tensor,
    requests: list[int],
    kv_cache: torch.Tensor,
    attn_metadata: CPUAttentionMetadata,
) -> torch.Tensor:
    """Return the attention of the last Q tokens of requests to all of their tokens."""
    length_R = attn_metadata.seq_lens[requests].long()
    num_blocks = -(-int(length_R.max()) // kv_cache.size(2))
    block_RB = attn_metadata.block_table[requests][:, :num_blocks].long()
    # Beyond its last block, the table of a request has numbers of other requests' blocks.
    key_RHKD, value_RHKD = (
        cache[block_RB].transpose(1, 2).flatten(2, 3) for cache in _key_and_value_cache(kv_cache)
    )
    num_queries = query_RQHD.size(1)
    last_key_RQ = length_R[:, None] - num_queries + torch.arange(num_queries)
    visible_RQK = torch.arange(key_RHKD.size(2)) <= last_key_RQ[:, :, None]
    mixed = layers.attention(
        query_RQHD.transpose(1, 2), key_RHKD, value_RHKD, visible_RQK.unsqueeze(1)
    )
    return mixed.transpose(1, 2)
