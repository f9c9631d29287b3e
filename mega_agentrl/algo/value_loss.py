"""Loss and explained variance of the critic.

With value V, value V_old from before the update, return R and clip width c (PPO, arXiv 1707.06347;
the value clip follows its authors' code):

    V_clip = clamp(V, V_old - c, V_old + c)
    loss   = 1/2 max((V - R)^2, (V_clip - R)^2)

A value that has already moved by more than c towards the return gets no gradient; a value that
moved away from it keeps the full gradient. `policy_loss.aggregate` reduces the loss to one number.

B trajectories, T response positions, float32.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import masked_mean, zero_masked
from mega_agentrl.algo.shape_checks import check_same_shape


def clipped_value_loss(
    value_BT: torch.Tensor,
    old_value_BT: torch.Tensor,
    return_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, [B, T] float32 and 0 where masked, and 0-d metrics.

    Args:
        value_BT: [B, T] current values, in units of the reward.
        old_value_BT: [B, T] values at the start of the update.
        return_BT: [B, T] target returns.
        mask_BT: [B, T] mask.
        clip: clip width c in units of the reward; infinity for no clip.

    Returns:
        The loss, and `value_clipfrac`, the fraction of unmasked positions where the clip was
        active.
    """
    check_same_shape(
        value_BT=value_BT, old_value_BT=old_value_BT, return_BT=return_BT, mask_BT=mask_BT
    )
    mask_BT = mask_BT.bool()
    new_BT = zero_masked(value_BT.float(), mask_BT)
    old_BT = zero_masked(old_value_BT.float(), mask_BT)
    target_BT = zero_masked(return_BT.float(), mask_BT)
    clipped_value_BT = torch.minimum(torch.maximum(new_BT, old_BT - clip), old_BT + clip)
    unclipped_error_BT = (new_BT - target_BT).square()
    clipped_error_BT = (clipped_value_BT - target_BT).square()
    clipfrac = masked_mean((clipped_error_BT > unclipped_error_BT).float(), mask_BT)
    return 0.5 * torch.maximum(unclipped_error_BT, clipped_error_BT), {
        "value_clipfrac": clipfrac.detach()
    }


def explained_variance(
    value_BT: torch.Tensor, return_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return 1 - Var(return - value) / Var(return) over unmasked positions, 0-d float64.

    The result is 1 for a perfect critic, 0 for one that predicts the mean return and negative for a
    worse one; NaN if the returns do not vary.
    """
    check_same_shape(value_BT=value_BT, return_BT=return_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    return_N, error_N = return_BT[mask_BT].double(), (return_BT - value_BT)[mask_BT].double()
    if return_N.numel() == 0:
        return return_N.new_full((), torch.nan)
    fraction = 1.0 - error_N.var(correction=0) / return_N.var(correction=0)
    return torch.where(return_N.amax() > return_N.amin(), fraction, torch.nan)
