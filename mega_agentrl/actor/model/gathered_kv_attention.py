"""Self-attention for more tensor ranks than key/value heads.

The rows of `linear_qkv` are grouped by key/value head, [queries of the group, key, value] each,
and split evenly over the tensor ranks, so no weight is held twice. A rank then has only a part
of the rows of its group; the ranks gather the outputs, and each selects its own queries and the
key and value of its group. Megatron's own code for this takes the tensor group from global
state; here it is the group that the layer was built with.

Shapes: S tokens, D head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention

if TYPE_CHECKING:
    import torch


class GatheredKVAttention(SelfAttention):
    """Megatron's `SelfAttention`, also for tensor ranks that share a key/value head."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's `[S, 1, heads, D]` query and `[S, 1, groups, D]` key and value."""
        num_groups, group = self.config.num_query_groups, self.pg_collection.tp
        if num_groups >= group.size():
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate, split_qkv
            )
        assert split_qkv and not output_gate, "only needed with fused kernels that are not in use"
        width = self.hidden_size_per_attention_head
        num_queries = self.config.num_attention_heads // num_groups
        sharers = group.size() // num_groups
        mine, part = divmod(group.rank(), sharers)
        local, _ = self.linear_qkv(hidden_states)
        whole = all_gather_last_dim_from_tensor_parallel_region(local, group=group)
        heads = whole.view(*whole.shape[:2], num_groups, num_queries + 2, width)[:, :, mine]
        own = num_queries // sharers
        query = heads[:, :, part * own : (part + 1) * own]
        key = heads[:, :, num_queries : num_queries + 1]
        value = heads[:, :, num_queries + 1 :]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value
