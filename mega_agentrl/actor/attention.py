"""Core attention over packed rows: what Megatron's layers call where Transformer Engine is absent.

The packed tokens pass through the layers as one sequence of batch 1 (`sbhd`), so that norms,
linears and rotary embedding see no padding between rows. Only here are rows told apart:

    GPU, 16-bit  torch's variable-length flash attention over the rows' boundaries, no padding
    otherwise    torch's scaled-dot-product attention over blocks of rows of similar length

With context ranks (`context`) keys and values of all ranks are gathered first.

Shapes: S tokens of this rank, W of all context ranks, H and Hkv local heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from mega_agentrl.actor.context import gather_tokens
from mega_agentrl.actor.segments import (
    PaddedPlan,
    RaggedPlan,
    boundaries,
    padded_plan,
    ragged_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class PackedRows(PackedSeqParams):
    """Row boundaries of a packed micro-batch, as Megatron hands them to the attention.

    position_S: [S] int64 position within the row. start_R: [R + 1] first token of each row in
    the whole packing, and W. Megatron's own fields hold the same for Transformer Engine, which
    cuts rows over context ranks as `context` does. Padding at a row's end counts there as part
    of the row: no real token sees it, and kernels without gaps stay usable.
    """

    position_S: torch.Tensor = None
    start_R: tuple[int, ...] = ()
    context_rank: int = 0
    context_size: int = 1

    @classmethod
    def of(
        cls,
        start_R: Sequence[int],
        position_S: torch.Tensor,
        *,
        context_rank: int = 0,
        context_size: int = 1,
    ) -> PackedRows:
        """The rows of a `MicroBatch`, on the device of its positions."""
        assert start_R[-1] == len(position_S) * context_size, "rows and tokens differ"
        lengths = [stop - start for start, stop in pairwise(start_R)]
        ends = boundaries(lengths, position_S.device)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            position_S=position_S,
            start_R=tuple(start_R),
            context_rank=context_rank,
            context_size=context_size,
        )

    @cached_property
    def padded(self) -> PaddedPlan:
        """The plan in blocks, on the device of the positions."""
        return padded_plan(
            self.start_R, self.context_rank, self.context_size, self.position_S.device
        )

    @cached_property
    def ragged(self) -> RaggedPlan:
        """The plan by boundaries, on the device of the positions."""
        return ragged_plan(
            self.start_R, self.context_rank, self.context_size, self.position_S.device
        )


class PackedAttention(MegatronModule):
    """Core attention of Megatron's `SelfAttention`; stands where `DotProductAttention` would."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """[S, 1, H, D] query, [S, 1, Hkv, D] key and value to [S, 1, H * D]."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        return attend(
            query, key, value, packed_seq_params, self.scale, context_group=self.context_group
        )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scale: float | None = None,
    *,
    context_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Causal attention inside each row. scale: of the scores, 1 / sqrt(D) by default.

    [S, 1, H, D] query, [S, 1, Hkv, D] key and value to [S, 1, H * D]. context_group: the ranks
    that share the rows, where rows.context_size is above 1.
    """
    query_SHD, key_WHD, value_WHD = (part.squeeze(1) for part in (query, key, value))
    if rows.context_size > 1:
        assert context_group is not None, "rows are cut over context ranks"
        both = gather_tokens(torch.cat([key_WHD, value_WHD], dim=1), context_group)
        key_WHD, value_WHD = both.chunk(2, dim=1)
    compute = _ragged if _has_ragged_kernel(query) else _padded
    return compute(query_SHD, key_WHD, value_WHD, rows, scale).reshape(query.size(0), 1, -1)


def _has_ragged_kernel(query: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.size(-1) % 8 == 0
        and query.size(-1) <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _ragged(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    rows: PackedRows,
    scale: float | None,
) -> torch.Tensor:
    plan = rows.ragged
    if plan.key_K is not None:
        key_WHD, value_WHD = (part.index_select(0, plan.key_K) for part in (key_WHD, value_WHD))
    return varlen_attn(
        query_SHD,
        key_WHD,
        value_WHD,
        plan.query_start_N,
        plan.key_start_N,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        # No look-ahead: the last query of a segment is aligned with its last key.
        window_size=(-1, 0),
        enable_gqa=query_SHD.size(1) != key_WHD.size(1),
    )


def _padded(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    rows: PackedRows,
    scale: float | None,
) -> torch.Tensor:
    plan = rows.padded
    if query_SHD.is_cuda and query_SHD.size(1) != key_WHD.size(1):
        # The only fused GPU kernel for 32 bits wants as many key heads as query heads.
        repeat = query_SHD.size(1) // key_WHD.size(1)
        key_WHD, value_WHD = (p.repeat_interleave(repeat, dim=1) for p in (key_WHD, value_WHD))
    key_sizes = [block.num_segments * block.num_keys for block in plan.blocks]
    query_sizes = [block.num_segments * block.num_queries for block in plan.blocks]
    parts = zip(
        plan.blocks,
        query_SHD.index_select(0, plan.query_P).split(query_sizes),
        key_WHD.index_select(0, plan.key_K).split(key_sizes),
        value_WHD.index_select(0, plan.key_K).split(key_sizes),
        strict=True,
    )
    done = []
    for block, query, key, value in parts:
        batch = (part.unflatten(0, (block.num_segments, -1)) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in batch),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        done.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(done).index_select(0, plan.slot_S)
