"""A cheap 64-bit checksum of bytes, computed on both sides of a transfer.

The bytes are read as 64-bit words w (zero-padded), laid out in rows of 1,024, and

    digest = sum_r a_r * sum_c b_c * w_rc   mod 2^64,       a_r, b_c odd and distinct

so that a changed bit, a lost or swapped row, and a shifted block all show. Every factor is odd,
hence any change within a single word is caught for certain. It finds accidents, not attacks.
"""

from __future__ import annotations

import torch

_COLUMNS = 1024
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number, odd


def digest(data: torch.Tensor) -> int:
    """Checksum of a contiguous uint8 tensor of any length, as a signed 64-bit number."""
    if data.dtype != torch.uint8 or data.ndim != 1:
        raise ValueError(f"digest: got {data.dtype} of rank {data.ndim}, expected flat uint8")
    row_bytes = 8 * _COLUMNS
    num_whole = data.numel() // row_bytes * row_bytes
    total = _digest_rows(data[:num_whole], first_row=0)
    rest = data[num_whole:]
    if rest.numel():
        padded = torch.zeros(row_bytes, dtype=torch.uint8, device=data.device)
        padded[: rest.numel()] = rest
        total = total + _digest_rows(padded, first_row=num_whole // row_bytes)
    # The length tells trailing zero bytes from none. Back to the signed range at the end.
    mixed = (int(total.item()) + data.numel() * _GOLDEN) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _digest_rows(data: torch.Tensor, first_row: int) -> torch.Tensor:
    """Partial sum over whole rows; wraps around like unsigned arithmetic does."""
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=data.device)
    if data.storage_offset() % 8:
        data = data.clone()
    word_RC = data.view(torch.int64).view(-1, _COLUMNS)
    factor_C = torch.arange(_COLUMNS, device=data.device) * 2 * _GOLDEN + 1
    factor_R = (torch.arange(word_RC.shape[0], device=data.device) + first_row) * 2 + 1
    return ((word_RC * factor_C).sum(1) * factor_R).sum()
