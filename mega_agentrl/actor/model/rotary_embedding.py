"""Rotary position embedding of packed rows, for every supported rope type.

The frequencies are those of `numerics.rotary_frequencies`. Megatron multiplies cosines and sines
itself, by a number that it derives from its configuration; `set_attention_factor` sets that
configuration.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.numerics.rotary_frequencies import compute_inv_freq

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mega_agentrl.actor.model.packed_attention import PackedTreeParams
    from mega_agentrl.reshard.mapping.rope_config import RopeConfig


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles by token position, in place of the `RotaryEmbedding` of `GPTModel`.

    Megatron asks for a sequence length and then for the angles of 0 .. length - 1. Here the
    "length" passed between the two calls is the tensor of all token positions.
    """

    def __init__(self, head_dim: int, rope: RopeConfig) -> None:
        super().__init__()
        # Not a buffer: casting the model to bfloat16 must not round the frequencies.
        self.inv_freq = compute_inv_freq(head_dim, rope)

    def get_rotary_seq_len(
        self,
        inference_context: None,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedTreeParams,
    ) -> torch.Tensor:
        """Return the positions, which Megatron passes on to `forward`."""
        return self.positions(packed_seq_params)

    def positions(self, trees: PackedTreeParams) -> torch.Tensor:
        """Return the `[S]` int64 positions of the packed tokens."""
        return trees.position_S

    def forward(
        self, position_S: torch.Tensor, packed_seq: bool = False, cp_group: None = None
    ) -> torch.Tensor:
        """Return the `[S, 1, 1, D]` float32 angles."""
        frequency = self.inv_freq.to(position_S.device)
        angle = torch.outer(position_S.float(), frequency)
        return torch.cat([angle, angle], dim=-1)[:, None, None, :]


class PackedMultimodalRotaryEmbedding(PackedRotaryEmbedding):
    """Rotary angles of vision-language models, whose tokens have positions along three axes.

    Every frequency turns by the position along one axis. With the sections (2, 3, 3) of eight
    frequencies these are T T H H H W W W, or if the axes are interleaved T H W T H W H W.
    """

    def __init__(self, head_dim: int, rope: RopeConfig) -> None:
        super().__init__(head_dim, rope)
        self.axis_of_frequency = compute_frequency_axes(rope)

    def positions(self, trees: PackedTreeParams) -> torch.Tensor:
        """Return the `[3, S]` int64 positions of the packed tokens."""
        assert trees.rotary_position_3S is not None, "packed for a text model"
        return trees.rotary_position_3S

    def forward(
        self, position_3S: torch.Tensor, packed_seq: bool = False, cp_group: None = None
    ) -> torch.Tensor:
        """Return the `[S, 1, 1, D]` float32 angles."""
        frequency = self.inv_freq.to(position_3S.device)
        axis = self.axis_of_frequency.to(position_3S.device)
        angle = position_3S.float().index_select(0, axis).t() * frequency
        return torch.cat([angle, angle], dim=-1)[:, None, None, :]


def compute_frequency_axes(rope: RopeConfig) -> torch.Tensor:
    """Return the `[D / 2]` int64 axis of each frequency: 0 time, 1 height, 2 width."""
    if not rope.mrope_interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(rope.mrope_section))
    axes = torch.zeros(sum(rope.mrope_section), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.mrope_section[axis] : 3] = axis
    return axes


def set_attention_factor(config: TransformerConfig, rope: RopeConfig) -> None:
    """Make Megatron multiply cosines and sines by the rope's attention factor.

    Megatron's fused rotary kernels ignore the factor; unless it is 1, `apply_rope_fusion` must be
    off.
    """
    if rope.attention_factor == 1.0:
        return
    # Megatron's factor is (0.1 a ln f + 1) / (0.1 b ln f + 1), with f, a and b in this order:
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale = 10.0 * (rope.attention_factor - 1.0)
    config.yarn_mscale_all_dim = 0.0
