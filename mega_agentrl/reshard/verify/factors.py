"""Factors of the digest (`digest`): one for every column of words, two for every row."""

from __future__ import annotations

import numpy as np
import torch

_COLUMN_KINDS, _ROW_KINDS = (0,), (1, 2)
_INITIAL_TABLE_SIZE = 4096

_factor_tables: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def column_factors(size: int, device: torch.device) -> torch.Tensor:
    """Return `[at least size]` int32 factors of the words of a row."""
    return _factor_table(_COLUMN_KINDS, size, device)[0]


def row_factors(size: int, device: torch.device) -> torch.Tensor:
    """Return `[2, at least size]` int32 factors of the rows."""
    return _factor_table(_ROW_KINDS, size, device)


def _factor_table(kinds: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Return `[kinds, at least size]` int32 factors from a cache that grows by doubling."""
    table = _factor_tables.get((kinds, device))
    if table is None or table.shape[1] < size:
        length = max(_INITIAL_TABLE_SIZE, 1 << (size - 1).bit_length())
        factors = torch.from_numpy(np.stack([_make_factors(kind, length) for kind in kinds]))
        table = _factor_tables[kinds, device] = factors.to(device)
    return table


def _make_factors(kind: int, length: int) -> np.ndarray:
    """Return `[length]` int32, odd: upper halves of SplitMix64 (Steele, Lea and Flood, 2014)."""
    position = np.arange(1, length + 1, dtype=np.uint64) + (np.uint64(kind) << np.uint64(40))
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    upper = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
    return (upper | np.uint32(1)).view(np.int32)
