"""Inverse frequencies of the rotary position embedding, for every supported rope type.

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
bit.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.reshard.mapping.rope_config import RopeConfig, RopeType


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
