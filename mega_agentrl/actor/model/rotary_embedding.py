"""Rotary position embedding of packed rows, for every supported rope type.

With head width d, base b, i = 0 .. d/2 - 1 and w_i = b^(-2i/d), and for the scaled types a
factor f and the L positions of the original training, the inverse frequencies are

    default w_i
    linear  w_i / f
    llama3  w_i / f where the wavelength 2 pi / w_i is above L / low_freq_factor, w_i where it
            is below L / high_freq_factor, and between them a blend linear in L / wavelength
    yarn    (arXiv:2309.00071) w_i where a dimension turns more than beta_fast times in L
            positions, w_i / f where it turns less than beta_slow times, and between them a
            blend linear in i; cosines and sines are multiplied by the attention factor

They are computed in float32 with transformers' order of operations, so that both agree bit by
bit. Megatron multiplies cosines and sines itself, by a number that it derives from its
configuration; `set_attention_factor` sets that configuration.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard.mapping.rope_config import RopeConfig, RopeType

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mega_agentrl.actor.model.packed_attention import PackedTreeParams


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


def compute_inv_freq(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Return the `[D / 2]` inverse frequencies in radians per position, float32."""
    default_inv_freq = 1.0 / rope.theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    )
    if rope.rope_type is RopeType.linear:
        return default_inv_freq / rope.factor
    if rope.rope_type is RopeType.llama3:
        return _llama3_inv_freq(default_inv_freq, rope)
    if rope.rope_type is RopeType.yarn:
        return _yarn_inv_freq(head_dim, rope)
    return default_inv_freq


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


def _llama3_inv_freq(default_inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / default_inv_freq
    is_long = wavelength > rope.original_max_position_embeddings / low
    is_short = wavelength < rope.original_max_position_embeddings / high
    default_share = (rope.original_max_position_embeddings / wavelength - low) / (high - low)
    blend = (1 - default_share) * default_inv_freq / rope.factor + default_share * default_inv_freq
    scaled = torch.where(is_long, default_inv_freq / rope.factor, default_inv_freq)
    return torch.where(is_long | is_short, scaled, blend)


def _yarn_inv_freq(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """Return the unrounded index of the dimension with `rotations` turns in L positions."""
        span = math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
        return head_dim * span / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    default_share = 1 - ramp.clamp(0, 1)
    power = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (rope.factor * power) * (1 - default_share) + 1.0 / power * default_share
