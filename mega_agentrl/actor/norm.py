"""Root-mean-square norm for Megatron's local layers, rounded as Hugging Face's models do.

    y = weight * round(x / sqrt(mean(x^2) + eps))

The mean and the division are in float32; the quotient is rounded to the input's dtype before
the weight scales it. Megatron's wrapper of torch's norm refuses sequence parallelism, Apex's
norm knows no RMS; this one works on any cut of the tokens. That a cut makes the weight's
gradient a partial sum is `marks`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RmsNorm(torch.nn.Module):
    """Stands where Megatron's layer specs name a norm; weight [hidden_size], uninitialised."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device.device())
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to the same shape and dtype."""
        return self.weight * functional.rms_norm(hidden, self.weight.shape, eps=self.eps)
