"""Causal attention over packed rows, and rotary embedding by position.

Megatron packs in `thd` format only for Transformer Engine. Here the packed tokens pass
through its layers as one sequence of batch 1 (`sbhd`), so that norms, linears and rotary
embedding see no padding; only the attention itself scatters them to [rows, heads, longest,
head_dim], runs torch's fused causal kernel and gathers them back. Right padding is never
seen by a causal query that is not padding itself.

Shapes: S packed tokens, R rows, L longest row, H local heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class PackedRows(PackedSeqParams):
    """Row boundaries of a packed micro-batch, as Megatron hands them to the attention.

    position_S: [S] int64 position within the row. slot_S: [S] int64 place in the flat
    [R * L] padded layout. num_rows, longest: R and L.
    """

    position_S: torch.Tensor = None
    slot_S: torch.Tensor = None
    num_rows: int = 0
    longest: int = 0

    @classmethod
    def of(cls, start_R: Sequence[int], position_S: torch.Tensor) -> PackedRows:
        """From the first packed token of each row (and S at the end)."""
        lengths = torch.tensor(start_R).diff()
        longest = int(lengths.max())
        row_S = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return cls(
            qkv_format="sbhd",
            position_S=position_S,
            slot_S=row_S.to(position_S.device) * longest + position_S,
            num_rows=len(lengths),
            longest=longest,
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
        return attend(query, key, value, packed_seq_params, self.scale)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each row. scale: of the scores, 1 / sqrt(D) by default.

    [S, 1, H, D] query, [S, 1, Hkv, D] key and value to [S, 1, H * D].
    """
    out_RHLD = functional.scaled_dot_product_attention(
        _pad(query, rows),
        _pad(key, rows),
        _pad(value, rows),
        is_causal=True,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    out_SHD = out_RHLD.transpose(1, 2).flatten(0, 1).index_select(0, rows.slot_S)
    return out_SHD.reshape(query.size(0), 1, -1)


def _pad(value: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """[S, 1, H, D] packed to [R, H, L, D], zeros after each row's end."""
    flat = value.new_zeros(rows.num_rows * rows.longest, value.size(2), value.size(3))
    flat = flat.index_copy(0, rows.slot_S, value.squeeze(1))
    return flat.view(rows.num_rows, rows.longest, value.size(2), value.size(3)).transpose(1, 2)


class PackedRotary(torch.nn.Module):
    """Rotary angles by token position; stands where `GPTModel` keeps its `RotaryEmbedding`.

    Megatron asks for a length and then for the angles of 0..length-1; with packed rows the
    "length" that is passed between the two calls is the position of every token.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inverse_frequency = 1.0 / base**exponent

    def get_rotary_seq_len(
        self,
        inference_context: None,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedRows,
    ) -> torch.Tensor:
        """[S] int64 positions, which `forward` takes."""
        return packed_seq_params.position_S

    def forward(
        self, position_S: torch.Tensor, packed_seq: bool = False, cp_group: None = None
    ) -> torch.Tensor:
        """[S, 1, 1, D] float32 angles."""
        frequency = self.inverse_frequency.to(position_S.device)
        angle = torch.outer(position_S.float(), frequency)
        return torch.cat([angle, angle], dim=-1)[:, None, None, :]
