"""How far two computations of a model in bfloat16 may lie apart, and the exact one beside them.

A value between powers of two 2^e and 2^(e+1) is rounded to a multiple of 2^(e-7): the relative
error is spread evenly over at most +-2^-8, so its standard deviation is at most u = 2^-8 / sqrt(3).
A hidden state goes through about 16 roundings in a layer (norm, its weight, query or key or value,
rope, probabilities, output, o, residual; norm, its weight, gate, up, activation, product, down,
residual), each of a part of the state that is at most as large as the whole. If they are
independent, the relative error after L layers has a standard deviation of at most u * sqrt(16 L).
A logit is the product of the state with a weight: its error is that share of the logits' own
standard deviation s. A log-prob is a logit minus the logarithm of a sum over all of them, which has
an error of its own, and two computations have independent errors, each a factor of sqrt(2):

    standard deviation of a difference <= 2 * u * s * sqrt(16 L)

The entropy is a mean of log-probs, with no more error than one. In a mixture of experts, a rounding
may make a router choose another expert; the log-probs of that token and, through the attention, of
later ones then differ by more. The median over tokens leaves them out.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_UNIT_ERROR = 2**-8 / math.sqrt(3)
_ROUNDINGS_PER_LAYER = 16


def explained_difference(num_layers: int, logits: torch.Tensor) -> float:
    """Return the bound on the median difference of log-probs or entropies, in nats."""
    roundings = math.sqrt(_ROUNDINGS_PER_LAYER * num_layers)
    return 2 * _UNIT_ERROR * roundings * logits.std(-1).mean().item()


@cache
def load_rounded(folder: Path) -> Any:
    """Load a folder's model with weights rounded to bfloat16; it computes in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()


@torch.no_grad()
def exact_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the `[T - 1, V]` logits of all tokens after the first, from the rounded weights."""
    return load_rounded(folder)(torch.tensor([token_ids])).logits[0, :-1]


def exact_scores(folder: Path, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[T - 1]` log-probs and entropies of all tokens after the first."""
    logp_TV = exact_logits(folder, token_ids).log_softmax(-1)
    logp_T = logp_TV.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)
    return logp_T, -(logp_TV.exp() * logp_TV).sum(-1)


def median_gap(one: Sequence[float] | torch.Tensor, other: Sequence[float] | torch.Tensor) -> float:
    """Return the median absolute difference of two lists of numbers."""
    return (torch.as_tensor(one) - torch.as_tensor(other)).abs().median().item()
