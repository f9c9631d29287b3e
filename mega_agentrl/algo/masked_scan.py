"""Recursions along trajectories that skip masked tokens.

`apply_to_sampled_tokens` removes the masked positions from each row, so that a tool's answer
neither discounts nor separates the tokens around it, and scatters the result back. `discounted_sum`
computes

    y_t = x_t + g y_{t+1}

in blocks of 64: a product with a triangular matrix of powers of g within each block, and one step
per block for the carry. Rows are processed in small chunks to limit memory.

B trajectories, T response positions; R and L are rows and length of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.shape_checks import check_same_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS = 64
ROWS_PER_CHUNK = 16


def apply_to_sampled_tokens(
    formula: Callable[..., torch.Tensor], mask_BT: torch.Tensor, *grids_BT: torch.Tensor
) -> torch.Tensor:
    """Apply `formula` to the unmasked values of each row; 0 where masked, [B, T] float64.

    Args:
        formula: maps one [R, L] float64 tensor per grid to another; in each row the unmasked values
            come first, in order, padded with zeros.
        mask_BT: [B, T] mask.
        grids_BT: [B, T] tensors.
    """
    for grid_BT in grids_BT:
        check_same_shape(grid_BT=grid_BT, mask_BT=mask_BT)

    def rows(mask_RT: torch.Tensor, *grids_RT: torch.Tensor) -> torch.Tensor:
        on_RT = mask_RT.bool()
        place_RT = on_RT.cumsum(1) - 1
        target_RT = torch.where(on_RT, place_RT, mask_RT.shape[1])
        result_RL = formula(*(_compact_sampled(grid_RT, on_RT, target_RT) for grid_RT in grids_RT))
        picked_RT = result_RL.gather(1, place_RT.clamp(min=0))
        return torch.where(on_RT, picked_RT, torch.zeros_like(picked_RT))

    return map_row_chunks(rows, mask_BT, *grids_BT)


def map_row_chunks(rows: Callable[..., torch.Tensor], *grids_BT: torch.Tensor) -> torch.Tensor:
    """Apply `rows` to chunks of rows and concatenate; the rows must be independent."""
    return torch.cat([rows(*part) for part in row_chunks(*grids_BT)])


def row_chunks(*tensors_B: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Iterate over the tensors a few rows at a time, so that intermediate results stay in cache."""
    return zip(*(torch.split(tensor_B, ROWS_PER_CHUNK) for tensor_B in tensors_B), strict=True)


def shift_left(x_RL: torch.Tensor) -> torch.Tensor:
    """Return the value one position to the right, 0 at the end, [R, L]."""
    return torch.nn.functional.pad(x_RL[:, 1:], (0, 1))


def discounted_sum(x_RL: torch.Tensor, factor: float) -> torch.Tensor:
    """Return each value plus `factor` times the result one position to the right, [R, L]."""
    num_rows, width = x_RL.shape
    num_blocks = max(-(-width // BLOCK_TOKENS), 1)
    padded_RL = torch.nn.functional.pad(x_RL, (0, num_blocks * BLOCK_TOKENS - width))
    step = torch.arange(BLOCK_TOKENS, device=x_RL.device, dtype=x_RL.dtype)
    power = torch.as_tensor(factor, device=x_RL.device, dtype=x_RL.dtype)
    # within[j, i]: how much of x_j, in the same block, reaches y_i.
    within = torch.where(step[:, None] >= step, power ** (step[:, None] - step).clamp(min=0), 0.0)
    own = padded_RL.view(num_rows, num_blocks, BLOCK_TOKENS) @ within
    carry_R = x_RL.new_zeros(num_rows)
    behind: list[torch.Tensor] = []
    for block in range(num_blocks - 1, -1, -1):
        behind.append(carry_R)
        carry_R = own[:, block, 0] + power**BLOCK_TOKENS * carry_R
    reach = power ** (BLOCK_TOKENS - step)
    total = own + torch.stack(behind[::-1], dim=1)[:, :, None] * reach
    return total.view(num_rows, num_blocks * BLOCK_TOKENS)[:, :width]


def _compact_sampled(
    x_RT: torch.Tensor, on_RT: torch.Tensor, target_RT: torch.Tensor
) -> torch.Tensor:
    """Move the unmasked values to the front of each row, zeros after them, [R, T + 1] float64."""
    values_RT = torch.where(on_RT, x_RT, torch.zeros_like(x_RT)).double()
    empty_RL = values_RT.new_zeros(x_RT.shape[0], x_RT.shape[1] + 1)
    return empty_RL.scatter(1, target_RT, values_RT)
