"""Root-mean-square norm for Megatron's local layers, with Hugging Face's rounding.

    y = weight * round(x / sqrt(mean(x^2) + eps))

Mean and division are in float32; the quotient is rounded to the input's dtype before it is
multiplied by the weight. Megatron's wrapper of torch's norm refuses sequence parallelism and
Apex's norm has no RMS variant; this one works on any subset of the tokens. The weight's
gradient is then a partial sum, which `parallel.grad_sync_flags` makes Megatron add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Norm for Megatron's layer specs; its weight `[hidden_size]` is uninitialised."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device.current_device())
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., hidden_size]`; shape and dtype stay the same."""
        return self.weight * functional.rms_norm(hidden, self.weight.shape, eps=self.eps)
