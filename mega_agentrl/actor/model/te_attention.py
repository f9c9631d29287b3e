"""Transformer Engine's core attention on packed trees.

Megatron passes queries, keys and values as one sequence of batch size 1, with the rotary
embedding already applied. Transformer Engine takes the same tokens as `thd`, without the batch
dim and with the boundaries of the trees, if every tree is a single row. The branches of a tree with
forks have more keys than queries. Megatron has no mask type for them and Transformer Engine's
context parallelism cannot split them, so `packed_attention` computes micro-batches with forks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention

from mega_agentrl.actor.model.packed_attention import packed_attention

if TYPE_CHECKING:
    import torch

    from mega_agentrl.actor.model.packed_attention import PackedTreeParams
    from mega_agentrl.config.enums import TreeAttention


class PackedTEAttention(TEDotProductAttention):
    """`TEDotProductAttention` that takes packed trees from Megatron's layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of the base class; softmax_scale and pg_collection by keyword."""
        super().__init__(*args, **kwargs)
        self._scale = kwargs.get("softmax_scale")
        self._context_group = kwargs["pg_collection"].cp
        self.tree_attention: TreeAttention = self.config.tree_attention

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        attention_bias: None = None,
        packed_seq_params: PackedTreeParams | None = None,
    ) -> torch.Tensor:
        """Map `[S, 1, H, D]` query and `[S, 1, Hkv, D]` key and value to `[S, 1, H * D]`."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        if packed_seq_params.has_forks:
            return packed_attention(
                query,
                key,
                value,
                packed_seq_params,
                self._scale,
                context_group=self._context_group,
                tree_attention=self.tree_attention,
            )
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
