"""Precision of the losses: float32, or float64 for float64 inputs.

Half precision rounds away a log-ratio of 1e-3, so `algo` never subtracts log-probs in it. float64
is kept, so that gradients can be checked against finite differences.
"""

from __future__ import annotations

import torch


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as float32, or unchanged if it is float64; integers and masks become float32."""
    return x if x.dtype == torch.float64 else x.float()
