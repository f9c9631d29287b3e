"""Shape checks for the functions of `algo`: the rank comes from the suffix of the name.

``same_shape(logp_BT=x, mask_BT=y)`` wants two tensors of rank two and one shape. The error
names every tensor with its shape, so that the odd one can be seen. Checks no dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


def check_rank(**tensors: torch.Tensor) -> None:
    """Each tensor has as many axes as its name has suffix letters (`reward_B`: 1)."""
    for name, tensor in tensors.items():
        suffix = name.rpartition("_")[2]
        if tensor.ndim != len(suffix):
            others = [other for other in tensors if other != name]
            beside = f"; beside it {_named(tensors, others)}" if others else ""
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected {len(suffix)} axes "
                f"[{', '.join(suffix)}]{beside}"
            )


def same_shape(**tensors: torch.Tensor) -> None:
    """All tensors have the rank their name says and one shape."""
    check_rank(**tensors)
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise ValueError(f"expected one shape for all of these, got {_named(tensors, tensors)}")


def same_rows(row_B: torch.Tensor, grid_BT: torch.Tensor) -> None:
    """A value per row and a grid agree in the number of rows."""
    check_rank(row_B=row_B, grid_BT=grid_BT)
    if row_B.shape[0] != grid_BT.shape[0]:
        raise ValueError(
            f"expected as many rows in both, got [B] {tuple(row_B.shape)} "
            f"and [B, T] {tuple(grid_BT.shape)}"
        )


def _named(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in names)
