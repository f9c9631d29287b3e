"""Matrix product that adds to a wider result."""

from __future__ import annotations

import torch


def matmul_accumulate(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool = False
) -> None:
    """Compute out += left @ right, or out = left @ right if `fresh`, summed in out's dtype.

    A GPU multiplies the narrow dtypes directly; a CPU converts the factors first.
    """
    beta = 0.0 if fresh else 1.0
    if left.is_cuda and left.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)
