"""Transformer Engine's core attention on packed rows.

Megatron passes queries, keys and values as one sequence of batch size 1, with the rotary
embedding already applied. Transformer Engine takes the same tokens as `thd`, without the batch
dim and with the row boundaries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention

if TYPE_CHECKING:
    import torch

    from mega_agentrl.actor.model.packed_attention import PackedRowParams


class PackedTEAttention(TEDotProductAttention):
    """`TEDotProductAttention` that takes packed rows from Megatron's layers."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        attention_bias: None = None,
        packed_seq_params: PackedRowParams | None = None,
    ) -> torch.Tensor:
        """Map `[S, 1, H, D]` query and `[S, 1, Hkv, D]` key and value to `[S, 1, H * D]`."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        out = super().forward(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            attention_mask,
            attn_mask_type,
            attention_bias,
            replace(packed_seq_params, qkv_format="thd"),
        )
        return out.reshape(query.size(0), 1, -1)
