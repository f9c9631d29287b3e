"""High-entropy windows (HWE) of ARES (arXiv 2510.08457).

The window of a position is the next `window` tokens of the same turn (a run of unmasked positions),
so it never spans a tool's answer. Its entropy is the mean of their entropies in nats; a position
with fewer tokens after it has no window. A position is an HWE if it is a trigger and its window
entropy is at or above the threshold; the HWE mask covers the tokens of the window. The caller
chooses the triggers: all positions or certain words.

The threshold follows the 95th percentile of each trajectory's window entropies (`threshold_p95`).
As in the released code, a position without a window counts with the mean entropy of the windows
before it, or with the trajectory's first token entropy if there is no window before it.

B trajectories, T response positions; R rows of a chunk, N their largest values.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import map_row_chunks, shift, zero_masked
from mega_agentrl.algo.shape_checks import check_rank, check_same_shape
from mega_agentrl.errors import InputError

WINDOW_TOKENS = 4
"""Default number of tokens in a window."""
PERCENTILE = 0.95
"""Percentile of the window entropies that `threshold_p95` returns."""


def window_entropy(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, window: int = WINDOW_TOKENS
) -> torch.Tensor:
    """Return the mean entropy of the `window` tokens after each position, [B, T].

    NaN for positions that are masked or have no window.

    Args:
        entropy_BT: [B, T] token entropies, nats.
        mask_BT: [B, T] mask.
        window: number of tokens in a window.

    Raises:
        ValueError: `window` is below 1.
    """
    check_same_shape(entropy_BT=entropy_BT, mask_BT=mask_BT)
    _check_window(window)

    def means_of_rows(entropy_RT: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        return _window_means(entropy_RT, mask_RT.bool(), window).to(entropy_BT.dtype)

    return map_row_chunks(means_of_rows, entropy_BT.detach(), mask_BT)


def hwe_count(
    window_entropy_BT: torch.Tensor, trigger_BT: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """Return the number of triggers whose window is at or above the threshold, [B] int64.

    Args:
        window_entropy_BT: [B, T] result of `window_entropy`.
        trigger_BT: [B, T] bool or 0/1, the positions that may be HWEs.
        threshold: lowest window entropy of an HWE, nats; -1 counts every trigger with a window.
    """
    check_same_shape(window_entropy_BT=window_entropy_BT, trigger_BT=trigger_BT)
    return ((window_entropy_BT >= threshold) & trigger_BT.bool()).sum(1)


def soft_cost(
    window_entropy_BT: torch.Tensor, trigger_BT: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """Return the sum of (window entropy - threshold) over the HWEs of a trajectory, [B] nats.

    The arguments are those of `hwe_count`.
    """
    check_same_shape(window_entropy_BT=window_entropy_BT, trigger_BT=trigger_BT)
    is_hwe_BT = (window_entropy_BT >= threshold) & trigger_BT.bool()
    return zero_masked(window_entropy_BT - threshold, is_hwe_BT).sum(1)


def hwe_mask(
    window_entropy_BT: torch.Tensor, *, threshold: float, window: int = WINDOW_TOKENS
) -> torch.Tensor:
    """Return a mask of the tokens in windows at or above the threshold, [B, T] bool.

    Args:
        window_entropy_BT: [B, T] result of `window_entropy`.
        threshold: lowest entropy of a window in the mask, nats.
        window: number of tokens in a window, as for `window_entropy`.
    """
    check_rank(window_entropy_BT=window_entropy_BT)
    _check_window(window)
    is_high_BT = window_entropy_BT >= threshold
    in_window_BT = torch.zeros_like(is_high_BT)
    for distance in range(1, window + 1):
        in_window_BT = in_window_BT | shift(is_high_BT, distance)
    return in_window_BT


def threshold_p95(
    entropy_BT: torch.Tensor, mask_BT: torch.Tensor, *, window: int = WINDOW_TOKENS
) -> torch.Tensor:
    """Return the interpolated 95th percentile of each trajectory's window entropies, [B].

    NaN for a trajectory without unmasked tokens.

    Args:
        entropy_BT: [B, T] token entropies, nats.
        mask_BT: [B, T] mask.
        window: number of tokens in a window.
    """
    check_same_shape(entropy_BT=entropy_BT, mask_BT=mask_BT)
    _check_window(window)
    if not entropy_BT.numel():
        return torch.full_like(entropy_BT[:, :1].sum(1), torch.nan)

    def percentile_of_rows(entropy_RT: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        mask_RT = mask_RT.bool()
        value_RT = _fill_missing_windows(
            entropy_RT, mask_RT, _window_means(entropy_RT, mask_RT, window)
        )
        return _percentile(value_RT, mask_RT.sum(1)).to(entropy_BT.dtype)

    return map_row_chunks(percentile_of_rows, entropy_BT.detach(), mask_BT)


def normalize_trigger_token(token_text: str) -> str:
    """Return the token as word lists spell it: lower case, without the leading-space marker."""
    return token_text.lstrip("\u2581\u0120").strip().lower()


def _window_means(entropy_RT: torch.Tensor, mask_RT: torch.Tensor, window: int) -> torch.Tensor:
    """Return window entropies, NaN where there is no window, [R, T] float64."""
    values_RT = zero_masked(entropy_RT, mask_RT).double()
    total_RT, has_window_RT = torch.zeros_like(values_RT), mask_RT
    for distance in range(1, window + 1):
        total_RT = total_RT + shift(values_RT, -distance)
        has_window_RT = has_window_RT & shift(mask_RT, -distance)
    return torch.where(has_window_RT, total_RT / window, torch.nan)


def _fill_missing_windows(
    entropy_RT: torch.Tensor, mask_RT: torch.Tensor, window_RT: torch.Tensor
) -> torch.Tensor:
    """Return window entropies with fallback values for missing windows and -inf where masked.

    The fallback is the mean of the windows before the position, or the row's first token entropy.

    Args:
        entropy_RT: [R, T] token entropies, nats.
        mask_RT: [R, T] bool mask.
        window_RT: [R, T] result of `_window_means`.
    """
    has_window_RT = window_RT.isfinite()
    total_RT = torch.where(has_window_RT, window_RT, 0.0).cumsum(1)
    running_mean_RT = total_RT / has_window_RT.cumsum(1).clamp(min=1)
    first_index_R = mask_RT.int().argmax(1)
    first_entropy_R1 = entropy_RT.gather(1, first_index_R[:, None]).double()
    fallback_RT = torch.where(has_window_RT.cumsum(1) > 0, running_mean_RT, first_entropy_R1)
    return torch.where(has_window_RT, window_RT, torch.where(mask_RT, fallback_RT, -torch.inf))


def _percentile(value_RT: torch.Tensor, num_R: torch.Tensor) -> torch.Tensor:
    """Return the interpolated 95th percentile of each row's `num_R` largest values, NaN for none.

    Args:
        value_RT: [R, T] values, -inf at the positions that do not count.
        num_R: [R] int64 number of positions that count.
    """
    last_index_R = (num_R - 1).clamp(min=0)
    from_top_R = last_index_R - PERCENTILE * last_index_R.double()
    num_needed = min(int((1 - PERCENTILE) * int(last_index_R.max())) + 3, value_RT.shape[1])
    top_RN = value_RT.topk(num_needed, dim=1).values
    upper_R = from_top_R.floor().long()
    lower_R = torch.minimum(upper_R + 1, last_index_R)
    fraction_R = from_top_R - upper_R
    pair_R2 = top_RN.gather(1, torch.stack([upper_R, lower_R], dim=1))
    # The smallest value has no successor: the next entry of the row is -inf.
    gap_R = torch.where(lower_R > upper_R, pair_R2[:, 1] - pair_R2[:, 0], 0.0)
    return torch.where(num_R > 0, pair_R2[:, 0] + fraction_R * gap_R, torch.nan)


def _check_window(window: int) -> None:
    if window < 1:
        raise InputError("window", window, "at least 1 token")
