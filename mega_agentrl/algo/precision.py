"""In which precision a loss is computed: float32, or float64 where the input is that already.

Half precision rounds a log-ratio of 1e-3 away, so nothing in `algo` subtracts log-probs in it.
float64 is kept as it is, so that a gradient can be held against finite differences.
"""

from __future__ import annotations

import torch


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` as float32, or as it is where it is float64; integers and masks become float32."""
    return x if x.dtype == torch.float64 else x.float()
