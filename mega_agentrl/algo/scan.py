"""Recursions along a trajectory that step over what the policy did not write.

`over_sampled` takes the masked positions out of each row, so a tool's answer neither discounts
nor separates what stands before and behind it, and puts the result back. Within it,
`discounted_sum` is the sum from the right with a factor g,

    y_t = x_t + g y_{t+1},

in blocks of 64: a product with a triangular matrix of powers of g within the blocks, and one
step per block for what comes from behind it. Memory is that of a few rows at a time.

B trajectories, T response positions; R and L the rows and the length of what is at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.shapes import same_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 64
ROWS_AT_ONCE = 16


def over_sampled(
    formula: Callable[..., torch.Tensor], mask_BT: torch.Tensor, *grids_BT: torch.Tensor
) -> torch.Tensor:
    """[B, T] float64: `formula` of the unmasked values of each row, 0 where masked.

    formula: from one [R, L] float64 per grid to another; in each row the unmasked values stand
    first, in order, and zeros fill up.
    """
    for grid_BT in grids_BT:
        same_shape(grid_BT=grid_BT, mask_BT=mask_BT)

    def rows(mask_RT: torch.Tensor, *grids_RT: torch.Tensor) -> torch.Tensor:
        on_RT = mask_RT.bool()
        place_RT = on_RT.cumsum(1) - 1
        target_RT = torch.where(on_RT, place_RT, mask_RT.shape[1])
        result_RL = formula(*(_dense(grid_RT, on_RT, target_RT) for grid_RT in grids_RT))
        picked_RT = result_RL.gather(1, place_RT.clamp(min=0))
        return torch.where(on_RT, picked_RT, torch.zeros_like(picked_RT))

    return by_rows(rows, mask_BT, *grids_BT)


def by_rows(rows: Callable[..., torch.Tensor], *grids_BT: torch.Tensor) -> torch.Tensor:
    """`rows` of a few rows of each grid at a time, put together; the rows must be independent."""
    return torch.cat([rows(*part) for part in row_parts(*grids_BT)])


def row_parts(*tensors_B: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, a few rows at a time: what is computed of them then stays in the cache."""
    return zip(*(torch.split(tensor_B, ROWS_AT_ONCE) for tensor_B in tensors_B), strict=True)


def following(x_RL: torch.Tensor) -> torch.Tensor:
    """[R, L]: the value one to the right, 0 at the end."""
    return torch.nn.functional.pad(x_RL[:, 1:], (0, 1))


def discounted_sum(x_RL: torch.Tensor, factor: float) -> torch.Tensor:
    """[R, L]: each value plus `factor` times the result one to the right."""
    num_rows, width = x_RL.shape
    num_blocks = max(-(-width // BLOCK), 1)
    padded_RL = torch.nn.functional.pad(x_RL, (0, num_blocks * BLOCK - width))
    step = torch.arange(BLOCK, device=x_RL.device, dtype=x_RL.dtype)
    power = torch.as_tensor(factor, device=x_RL.device, dtype=x_RL.dtype)
    # within[j, i]: how much of x_j, in the same block, reaches y_i.
    within = torch.where(step[:, None] >= step, power ** (step[:, None] - step).clamp(min=0), 0.0)
    own = padded_RL.view(num_rows, num_blocks, BLOCK) @ within
    carry_R = x_RL.new_zeros(num_rows)
    behind: list[torch.Tensor] = []
    for block in range(num_blocks - 1, -1, -1):
        behind.append(carry_R)
        carry_R = own[:, block, 0] + power**BLOCK * carry_R
    reach = power ** (BLOCK - step)
    total = own + torch.stack(behind[::-1], dim=1)[:, :, None] * reach
    return total.view(num_rows, num_blocks * BLOCK)[:, :width]


def _dense(x_RT: torch.Tensor, on_RT: torch.Tensor, target_RT: torch.Tensor) -> torch.Tensor:
    """[R, T + 1] float64: the unmasked values at the front of each row; the rest is 0."""
    kept_RT = torch.where(on_RT, x_RT, torch.zeros_like(x_RT)).double()
    empty_RL = kept_RT.new_zeros(x_RT.shape[0], x_RT.shape[1] + 1)
    return empty_RL.scatter(1, target_RT, kept_RT)
