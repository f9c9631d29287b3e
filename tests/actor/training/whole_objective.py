"""Reference of the RL objective, row by row and without the formulas of the package.

Every split into micro-batches, data ranks or context ranks must add up to it.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch

from mega_agentrl.config.algorithm_traits import LOSSES
from mega_agentrl.config.sections.algo import AlgoConfig

OPTIONS = {"clip_low": 0.1, "clip_high": 0.15, "clip_dual": 1.1, "max_ratio": 1.15}


def objective(loss):
    """Return settings under which every term of the objective has a gradient."""
    known = LOSSES.find(loss).options
    options = {name: value for name, value in OPTIONS.items() if name in known}
    return AlgoConfig(loss=loss, loss_options=options, kl_coef=0.1, entropy_coef=0.05)


def with_corrections(batch, seed=7):
    """Add importance weights between 0 and 2, some of them 0, and NaN where masked."""
    generator = torch.Generator().manual_seed(seed)
    weight_BT = 2 * torch.rand(batch.mask_BT.shape, generator=generator)
    weight_BT[weight_BT < 0.4] = 0
    return batch.with_fields(importance_weight_BT=weight_BT.masked_fill(~batch.mask_BT, torch.nan))


def loss_in_one_piece(algo, batch, logp_BT, entropy_BT):
    """Return the 0-d mean over the trained tokens, with the k3 estimator of the KL."""
    rows = [
        _row(algo, batch, row, logp_BT[row], entropy_BT[row]).sum() for row in range(batch.num_rows)
    ]
    return torch.stack(rows).sum() / batch.mask_BT.sum()


def _row(algo, batch, row, logp_T, entropy_T):
    on_T = batch.mask_BT[row]
    logp_N, old_N = logp_T[on_T], batch.old_logp_BT[row][on_T]
    advantage_N = batch.advantage_BT[row][on_T]
    turns = [len(list(run)) for on, run in groupby(on_T.tolist()) if on]
    loss_N = _policy(algo, logp_N, old_N, advantage_N, turns)
    if batch.importance_weight_BT is not None:
        loss_N = batch.importance_weight_BT[row][on_T] * loss_N
    gap_N = batch.ref_logp_BT[row][on_T] - logp_N
    return loss_N + algo.kl_coef * (gap_N.exp() - 1 - gap_N) - algo.entropy_coef * entropy_T[on_T]


def _policy(algo, logp_N, old_N, advantage_N, turns):
    options = algo.loss_options
    ratio_N = (logp_N - old_N).exp()
    if algo.has_user_loss:  # that of examples/my_loss.py
        return -advantage_N * ratio_N.clamp(max=options["max_ratio"])
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    if (algo.loss_traits.per_trajectory or algo.loss == "atpo") and turns:
        sizes = [len(logp_N)] if algo.loss_traits.per_trajectory else turns
        means = [one_K.mean().expand_as(one_K) for one_K in (logp_N - old_N).detach().split(sizes)]
        ratio_N = torch.cat(means).exp() * (logp_N - logp_N.detach() + 1)
    bound_N = ratio_N.clamp(low, high)
    if algo.loss == "future_kl":
        advantage_N = advantage_N * (
            1 + _future_weights(options["clip_dual"], ratio_N, advantage_N)
        )
    match algo.loss:
        case "cispo":
            return -bound_N.detach() * advantage_N * logp_N
        case "balanced":
            bound_N = torch.where(ratio_N > high, high * ratio_N / ratio_N.detach(), bound_N)
        case "clipped" | "gspo" | "atpo" | "future_kl":
            pass
        case _:
            raise ValueError(f"loss={algo.loss}: expected a loss with a formula here")
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * bound_N)
    if "clip_dual" not in options:
        return loss_N
    capped_N = torch.minimum(loss_N, -advantage_N * options["clip_dual"])
    if algo.loss == "future_kl" and ((advantage_N < 0) & (capped_N < loss_N)).sum() > 1:
        return torch.zeros_like(loss_N)
    return torch.where(advantage_N < 0, capped_N, loss_N)


def _future_weights(clip_dual, ratio_N, advantage_N):
    """Return the factors of `future_kl` with its default options."""
    weights, total = [], 0.0
    for ratio, advantage in reversed(
        list(zip(ratio_N.tolist(), advantage_N.tolist(), strict=True))
    ):
        total = 0.5 ** (1 / 64) * total + (math.log(ratio) if ratio <= clip_dual else 0.0)
        is_capped = advantage < 0 and ratio > 6
        weights.append(min(max(math.exp(total), 1.0), 1.0 if is_capped else 1.2))
    return torch.tensor(weights[::-1], dtype=ratio_N.dtype)
