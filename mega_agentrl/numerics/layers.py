"""The operations of a dense decoder in arithmetic that does not depend on the layout.

Policy and engine call these functions on their own tensors. A token's result depends on its own
inputs alone: not on the tokens beside it, on padding, on the order of keys or on the ranks that
share the work. The functions compute in float64 and round to the dtype of their input.

Shape suffixes: N tokens, H and Hkv heads, Q queries, K keys, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega_agentrl.errors import InputError
from mega_agentrl.numerics.elementary import exp, log, sin_cos
from mega_agentrl.numerics.exact_sums import (
    FixedPointRows,
    exact_matmul,
    exact_sum,
    power_above,
)

MAX_KEYS = 1 << 17
"""Bound on the keys of a query."""
MAX_VOCABULARY = 1 << 20
"""Bound on the size of the vocabulary."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `[..., width]` by the root mean square and multiply by the `[width]` weight.

    The quotient is rounded before it is multiplied, as Hugging Face does.
    """
    width, wide = hidden.size(-1), hidden.double()
    scale = power_above(wide)
    mean = exact_sum((wide / scale).square_(), width) / width * scale * scale
    return weight * (wide / (mean + eps).sqrt_()).to(hidden.dtype)


def silu(gate: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + e^-x)."""
    wide = gate.double()
    return (wide / exp(-wide).add_(1.0)).to(gate.dtype)


def rotate(heads: torch.Tensor, angle: torch.Tensor, factor: float) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of each head by an angle.

    Cosines and sines are rounded before they are multiplied, as Hugging Face does.

    Args:
        heads: `[N, H, D]`.
        angle: `[N, D/2]` radians.
        factor: Factor of cosines and sines, the attention factor of yarn.
    """
    sine, cosine = (
        (value * factor).to(heads.dtype).unsqueeze(1) for value in sin_cos(angle.double())
    )
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Compute softmax attention with the scale 1 / sqrt(D).

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, Hkv, K, D]`; values that no query sees are finite.
        value: `[B, Hkv, K, D]`; likewise.
        visible: bool that broadcasts to `[B, 1, Q, K]`, the keys that a query sees, at least one.

    Returns:
        `[B, H, Q, D]`.

    Raises:
        ValueError: More keys than `MAX_KEYS`.
    """
    if key.size(2) > MAX_KEYS:
        raise InputError("number of keys", key.size(2), f"at most {MAX_KEYS}")
    num_rows, num_heads, num_queries, width = query.shape
    num_groups, num_keys = key.shape[1:3]
    # The queries of a key/value head are as many rows of one product.
    rows = query.reshape(num_rows, num_groups, -1, width)
    scores = exact_matmul(rows, FixedPointRows.from_rows(key), num_terms=width) * width**-0.5
    scores = scores.view(num_rows, num_heads, num_queries, num_keys)
    scores = scores.masked_fill_(~visible, -torch.inf)
    scores = scores - scores.amax(dim=-1, keepdim=True)
    weights = exp(scores).masked_fill_(~visible, 0.0)
    total = exact_sum(weights, MAX_KEYS)
    # The scale of a value is one of its key, so it belongs to the weights.
    values = FixedPointRows.from_rows(value)
    scaled = weights.view(num_rows, num_groups, -1, num_keys) * values.scale.mT
    columns = FixedPointRows(values.integers.mT, torch.ones_like(values.integers[..., :1, :].mT))
    mixed = exact_matmul(scaled, columns, num_terms=MAX_KEYS).view(query.shape)
    return (mixed / total).to(query.dtype)


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over the vocabulary, or over a part of it; those of parts add up. `[N]` float64."""

    exponentials_N: torch.Tensor
    """sum exp(x), with the x of `shifted_logits`."""
    weighted_N: torch.Tensor
    """sum x exp(x)."""


def softmax_sums(
    logits_NV: torch.Tensor, largest_N: torch.Tensor, temperature_N: torch.Tensor | float
) -> SoftmaxSums:
    """Return the sums of a part of the vocabulary.

    Args:
        logits_NV: `[N, V]` logits.
        largest_N: `[N]` float64 largest logits of the whole vocabulary.
        temperature_N: `[N]` float64 divisors of the logits, or one for all.
    """
    x_NV = shifted_logits(logits_NV, largest_N, temperature_N)
    exponentials_NV = exp(x_NV)
    return SoftmaxSums(
        exact_sum(exponentials_NV, MAX_VOCABULARY).squeeze(-1),
        exact_sum(x_NV.mul_(exponentials_NV), MAX_VOCABULARY).squeeze(-1),
    )


def shifted_logits(
    logits_NV: torch.Tensor, largest_N: torch.Tensor, temperature_N: torch.Tensor | float
) -> torch.Tensor:
    """Return logit / temperature - largest logit / temperature, `[N, V]` float64."""
    largest_N1 = (largest_N / temperature_N)[:, None]
    if isinstance(temperature_N, torch.Tensor):
        temperature_N = temperature_N[:, None]
    return logits_NV.double() / temperature_N - largest_N1


def log_probs_and_entropy(
    logits_NV: torch.Tensor, temperature_N: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `[N, V]` log-probs and the `[N]` entropies in nats, float64, of all the logits."""
    largest_N = logits_NV.amax(dim=-1).double()
    sums = softmax_sums(logits_NV, largest_N, temperature_N)
    log_sum_N = log(sums.exponentials_N)
    logp_NV = shifted_logits(logits_NV, largest_N, temperature_N) - log_sum_N[:, None]
    return logp_NV, log_sum_N - sums.weighted_N / sums.exponentials_N
