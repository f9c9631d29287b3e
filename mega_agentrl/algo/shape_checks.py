"""Shape checks of the functions in `algo`; the suffix of an argument's name gives its rank.

``check_same_shape(logp_BT=x, mask_BT=y)`` expects two tensors of rank two and equal shape. Errors
list every tensor with its shape. Dtypes are not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


def check_rank(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` unless each tensor has one axis per suffix letter (`reward_B`: 1)."""
    for name, tensor in tensors.items():
        suffix = name.rpartition("_")[2]
        if tensor.ndim != len(suffix):
            others = [other for other in tensors if other != name]
            context = f"; the other tensors are {_format_shapes(tensors, others)}" if others else ""
            expected = f"{len(suffix)} axes [{', '.join(suffix)}]{context}"
            raise InputError(name, tuple(tensor.shape), expected)


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` unless all tensors have the rank of their names and the same shape."""
    check_rank(**tensors)
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = _format_shapes(tensors, tensors)
        raise InputError(", ".join(tensors), shapes, "one shape for all of these")


def check_same_rows(row_B: torch.Tensor, grid_BT: torch.Tensor) -> None:
    """Raise `ValueError` unless a [B] tensor and a [B, T] tensor have the same number of rows."""
    check_rank(row_B=row_B, grid_BT=grid_BT)
    if row_B.shape[0] != grid_BT.shape[0]:
        got = f"[B] of shape {tuple(row_B.shape)} and [B, T] of shape {tuple(grid_BT.shape)}"
        raise InputError("rows of two tensors", got, "equal numbers")


def _format_shapes(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in names)
