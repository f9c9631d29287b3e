"""Transformer Engine's core attention on packed rows.

Megatron hands queries, keys and values over as one sequence of batch 1, its rotary embedding
already applied by token position; Transformer Engine wants the same tokens as `thd`, without
the batch axis, with the rows' boundaries beside them. Importable only where it is installed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention

if TYPE_CHECKING:
    import torch

    from mega_agentrl.actor.attention import PackedRows


class PackedEngineAttention(TEDotProductAttention):
    """Stands where Megatron's spec names `TEDotProductAttention`."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        attention_bias: None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """[S, 1, H, D] query, [S, 1, Hkv, D] key and value to [S, 1, H * D]."""
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
