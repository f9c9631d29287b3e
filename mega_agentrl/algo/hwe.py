"""ARES's high-entropy windows (arXiv 2510.08457): where a policy keeps hesitating.

The window of a position is the next `window` tokens of the same turn, a turn being a run of
unmasked positions: a window never reaches over a tool's answer. Its entropy is their mean, in
nats; where fewer follow there is none. A position is a high-entropy window (HWE) where it is a
trigger and its window entropy is at or above the threshold; the window itself is what the mask
of an HWE covers. Which positions are triggers, all or those of certain words, the caller says.

The threshold follows the 95th percentile of each trajectory's windows (`threshold_p95`), for
which, as released, positions without a window take the mean of those before them, and before the
first one the trajectory's first entropy.

B trajectories, T response positions; R rows at hand.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.scan import by_rows
from mega_agentrl.algo.shapes import check_rank, same_shape

WINDOW = 4
PERCENTILE = 0.95


def window_entropy(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, window: int = WINDOW
) -> torch.Tensor:
    """[B, T] mean entropy of the `window` tokens after each position, NaN where there is none.

    entropy_BT: [B, T] float nats. Masked positions are NaN, whatever they hold.
    """
    same_shape(entropy_BT=entropy_BT, mask_BT=mask_BT)
    _check_window(window)

    def rows(entropy_RT: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        return _windows(entropy_RT, mask_RT.bool(), window).to(entropy_BT.dtype)

    return by_rows(rows, entropy_BT.detach(), mask_BT)


def hwe_count(
    window_entropy_BT: torch.Tensor, trigger_BT: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """[B] int64 number of triggers whose window is at or above the threshold.

    trigger_BT: [B, T] bool or 0/1. threshold: nats; -1 counts every trigger with a window.
    """
    same_shape(window_entropy_BT=window_entropy_BT, trigger_BT=trigger_BT)
    return ((window_entropy_BT >= threshold) & trigger_BT.bool()).sum(1)


def soft_cost(
    window_entropy_BT: torch.Tensor, trigger_BT: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """[B] sum over the triggers of what their windows have above the threshold, in nats."""
    same_shape(window_entropy_BT=window_entropy_BT, trigger_BT=trigger_BT)
    counted_BT = (window_entropy_BT >= threshold) & trigger_BT.bool()
    excess_BT = window_entropy_BT - threshold
    return torch.where(counted_BT, excess_BT, torch.zeros_like(excess_BT)).sum(1)


def hwe_mask(
    window_entropy_BT: torch.Tensor, *, threshold: float, window: int = WINDOW
) -> torch.Tensor:
    """[B, T] bool: the token lies in the window of a position at or above the threshold."""
    check_rank(window_entropy_BT=window_entropy_BT)
    _check_window(window)
    high_BT = window_entropy_BT >= threshold
    covered_BT = torch.zeros_like(high_BT)
    for shift in range(1, window + 1):
        covered_BT = covered_BT | _from_left(high_BT, shift)
    return covered_BT


def threshold_p95(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, window: int = WINDOW
) -> torch.Tensor:
    """[B] 95th percentile, linearly interpolated, of the window entropies of each trajectory.

    NaN for a trajectory without unmasked tokens: it has no say in the threshold.
    """
    same_shape(entropy_BT=entropy_BT, mask_BT=mask_BT)
    _check_window(window)
    if not entropy_BT.numel():
        return torch.full_like(entropy_BT[:, :1].sum(1), torch.nan)

    def rows(entropy_RT: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        on_RT = mask_RT.bool()
        filled_RT = _filled(entropy_RT, on_RT, _windows(entropy_RT, on_RT, window))
        return _percentile(filled_RT, on_RT.sum(1)).to(entropy_BT.dtype)

    return by_rows(rows, entropy_BT.detach(), mask_BT)


def trigger_word(token_text: str) -> str:
    """The token as it is looked up in a list of words: without its mark of a leading space."""
    return token_text.lstrip("\u2581\u0120").strip().lower()


def _windows(entropy_RT: torch.Tensor, on_RT: torch.Tensor, window: int) -> torch.Tensor:
    """[R, T] float64 window entropies, NaN where there is none."""
    kept_RT = torch.where(on_RT, entropy_RT, torch.zeros_like(entropy_RT)).double()
    total_RT, there_RT = torch.zeros_like(kept_RT), on_RT
    for shift in range(1, window + 1):
        total_RT = total_RT + _from_right(kept_RT, shift)
        there_RT = there_RT & _from_right(on_RT, shift)
    return torch.where(there_RT, total_RT / window, torch.nan)


def _filled(entropy_RT: torch.Tensor, on_RT: torch.Tensor, window_RT: torch.Tensor) -> torch.Tensor:
    """The windows, with a stand-in where an unmasked position has none; -inf where masked."""
    there_RT = window_RT.isfinite()
    total_RT = torch.where(there_RT, window_RT, 0.0).cumsum(1)
    before_RT = total_RT / there_RT.cumsum(1).clamp(min=1)
    first_R = on_RT.int().argmax(1)
    own_R1 = entropy_RT.gather(1, first_R[:, None]).double()
    stand_in_RT = torch.where(there_RT.cumsum(1) > 0, before_RT, own_R1)
    return torch.where(there_RT, window_RT, torch.where(on_RT, stand_in_RT, -torch.inf))


def _percentile(value_RT: torch.Tensor, num_R: torch.Tensor) -> torch.Tensor:
    """The percentile of the `num_R` largest values of each row; NaN where that is none."""
    last_R = (num_R - 1).clamp(min=0)
    from_top_R = last_R - PERCENTILE * last_R.double()
    num_needed = min(int((1 - PERCENTILE) * int(last_R.max())) + 3, value_RT.shape[1])
    top_RK = value_RT.topk(num_needed, dim=1).values
    upper_R = from_top_R.floor().long()
    lower_R = torch.minimum(upper_R + 1, last_R)
    share_R = from_top_R - upper_R
    pair_R2 = top_RK.gather(1, torch.stack([upper_R, lower_R], dim=1))
    # The last one down has no neighbour; what follows it in the row is no value.
    gap_R = torch.where(lower_R > upper_R, pair_R2[:, 1] - pair_R2[:, 0], 0.0)
    return torch.where(num_R > 0, pair_R2[:, 0] + share_R * gap_R, torch.nan)


def _from_right(x_RT: torch.Tensor, shift: int) -> torch.Tensor:
    return torch.nn.functional.pad(x_RT[:, shift:], (0, min(shift, x_RT.shape[1])))


def _from_left(x_RT: torch.Tensor, shift: int) -> torch.Tensor:
    width = x_RT.shape[1]
    return torch.nn.functional.pad(x_RT[:, : max(width - shift, 0)], (min(shift, width), 0))


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window={window}: expected at least 1 token")
