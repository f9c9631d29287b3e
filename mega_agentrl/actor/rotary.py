"""Rotary embedding by token position: inverse frequencies of every supported kind, as angles.

With d the head width, base b and i = 0 .. d/2 - 1, w_i = b^(-2i/d) and, for the scaled kinds,
factor f and L positions in the first training:

    linear  w_i / f
    llama3  w_i / f where the wavelength 2 pi / w_i is above L / low, w_i where it is below
            L / high, and a blend that is linear in L / wavelength between
    yarn    (arXiv 2309.00071) w_i where a dimension turns more than beta_fast times in L
            positions, w_i / f where less than beta_slow, and a blend that is linear in i
            between; cosines and sines are multiplied by the attention factor

In float32 and in the order of operations of transformers, so that both give the same bits.
Megatron multiplies cosines and sines itself, by a number it computes from its configuration:
`set_attention_factor` puts the right one there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard.rope_shape import RopeKind, RopeShape

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mega_agentrl.actor.attention import PackedRows


class PackedRotary(torch.nn.Module):
    """Rotary angles by token position; stands where `GPTModel` keeps its `RotaryEmbedding`.

    Megatron asks for a length and then for the angles of 0..length-1; with packed rows the
    "length" that is passed between the two calls is the position of every token.
    """

    def __init__(self, head_dim: int, rope: RopeShape) -> None:
        super().__init__()
        # No buffer: a model cast to bfloat16 must not round the frequencies.
        self.inverse_frequency = inverse_frequency(head_dim, rope)

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


def inverse_frequency(head_dim: int, rope: RopeShape) -> torch.Tensor:
    """[D / 2] float32 radians per position."""
    plain = 1.0 / rope.base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind is RopeKind.linear:
        return plain / rope.factor
    if rope.kind is RopeKind.llama3:
        return _llama3(plain, rope)
    if rope.kind is RopeKind.yarn:
        return _yarn(head_dim, rope)
    return plain


def set_attention_factor(config: TransformerConfig, rope: RopeShape) -> None:
    """Make Megatron multiply cosines and sines by the rope's attention factor.

    Not done by its fused rotary kernels: `apply_rope_fusion` must be off where it is not 1.
    """
    if rope.attention_factor == 1.0:
        return
    # Megatron multiplies by (0.1 a ln f + 1) / (0.1 b ln f + 1) of these three.
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale = 10.0 * (rope.attention_factor - 1.0)
    config.yarn_mscale_all_dim = 0.0


def _llama3(plain: torch.Tensor, rope: RopeShape) -> torch.Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    long = wavelength > rope.original_positions / low
    short = wavelength < rope.original_positions / high
    share = (rope.original_positions / wavelength - low) / (high - low)
    blend = (1 - share) * plain / rope.factor + share * plain
    scaled = torch.where(long, plain / rope.factor, plain)
    return torch.where(long | short, scaled, blend)


def _yarn(head_dim: int, rope: RopeShape) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """Index, not rounded, of the dimension that turns so often in the first training."""
        span = math.log(rope.original_positions / (rotations * 2 * math.pi))
        return head_dim * span / (2 * math.log(rope.base))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    keep = 1 - ramp.clamp(0, 1)
    power = rope.base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (rope.factor * power) * (1 - keep) + 1.0 / power * keep
