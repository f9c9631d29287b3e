"""Advantages of a batch, per token, computed after the policy and the reference have scored it.

    reward   r - kl_coef * sum of KL over the trajectory's tokens      algo.kl_placement=reward
             (with ARES each token has a weight of its own)
    A        the estimator of algo.advantage: a registered one, or a user's function
    A        + lam * clip(H, -|A| / alpha, |A| / alpha)                algo.egpo.lam > 0
    A_t      the trajectory's A, or averaged over shared tokens of the tree (arpo_hard)
    A_t      * (1 + weight * z of the token's entropy)         algo.entropy_advantage_weight > 0

The steps are applied in this order, with the formulas of `algo`. Some estimators (`estimators`,
which says how to add one) work on tokens from the start. Entropies and log-probs are those of the
policy's own forward pass at the sampling temperature; if one is missing, that is an error.

A trajectory counts once, however many rows it has (`trajectory_rows`): its rows share one
advantage, one sum of KL and one chain of thought, and their values are read as one sequence, so
that the value after a row is that of the next row's first token. A failed trajectory has no
trained token and a group of its own, so it changes nothing. If all others of a group failed, the
one that is left has no baseline: estimators that compare the trajectories of a prompt do not see
its tokens, and its advantage is 0.

Shape suffixes: B rows, A trajectories, T response positions, L positions of a whole trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.aepo import entropy_scaled
from mega_agentrl.algo.correction import importance_weights, logprob_mismatch
from mega_agentrl.algo.egpo import (
    MAX_TOKENS_BEHIND_OPENING,
    cot_entropy,
    cot_mask,
    egpo,
    opened_turns,
)
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.config.enums import CotBlocks, KlPlacement, RolloutCorrection
from mega_agentrl.errors import InputError
from mega_agentrl.train.estimators.registry import AdvantageInputs, AdvantageResult, find_advantage
from mega_agentrl.train.trajectory_rows import TrajectoryRows

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig, EgpoConfig
    from mega_agentrl.types.batch import TrainBatch

CotMarkerIds = tuple[tuple[int, ...], tuple[int, ...]]

IMPORTANCE_WEIGHT_MODES = {"truncate": "truncated", "mask": "masked"}


def add_advantages(
    batch: TrainBatch,
    algo: AlgoConfig,
    *,
    kl_coef: float,
    cot_marker_ids: CotMarkerIds | None,
    kl_weight_BT: torch.Tensor | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `advantage_BT` [B, T] float32, 0 on untrained tokens; with a critic also `return_BT`.

    Args:
        batch: A batch with rewards, log-probs and entropies.
        algo: Settings of the algorithm.
        kl_coef: Weight of a KL in the reward; `algo.kl_coef` is only its initial value.
        cot_marker_ids: Token ids that open and close the chain of thought; only read with EGPO.
        kl_weight_BT: [B, T] weight of each token's KL in the reward (ARES), in place of `kl_coef`.

    Returns:
        The batch and metrics. Over trained tokens: `advantage/abs_mean`, `advantage/zero_fraction`,
        `advantage/ref_kl` (nats per token, with a KL in the reward) and `aepo/sign_flip_fraction`
        (with AEPO's scale). With an estimator that compares: `advantage/num_without_baseline`, the
        number of trajectories that are left alone in their group. Over trajectories, with EGPO:
        `egpo/cot_entropy` (nats), `egpo/no_cot_fraction`, `egpo/bonus_mean` and `egpo/clipfrac`,
        the fraction whose entropy is above the bound.

    Raises:
        ValueError: A field that the settings need is missing, or a user's function returns
            anything but finite advantages.
    """
    mask_BT, rows, metrics = batch.mask_BT, TrajectoryRows.from_batch(batch), dict[str, float]()
    kl_BT = None
    if algo.kl_placement is KlPlacement.reward and algo.needs_reference:
        kl_BT = _ref_kl(batch, algo)
        metrics["advantage/ref_kl"] = float(masked_mean(kl_BT, mask_BT))
        if kl_weight_BT is not None:
            kl_BT, kl_coef = kl_BT * kl_weight_BT, 1.0
    traits = algo.estimator
    _require_inputs(batch, algo)
    compared_batch = batch
    if traits.needs_groups or traits.needs_greedy_baseline:
        is_alone_A = _has_no_baseline(batch, rows, greedy=traits.needs_greedy_baseline)
        metrics["advantage/num_without_baseline"] = float(is_alone_A.sum())
        mask_BT = mask_BT & ~is_alone_A[rows.trajectory_B].unsqueeze(1)
        compared_batch = batch.with_fields(mask_BT=mask_BT)
    inputs = AdvantageInputs(batch=compared_batch, rows=rows, kl_BT=kl_BT, kl_coef=kl_coef)
    result = (
        find_advantage(algo)(inputs, algo, **algo.advantage_options)
        if mask_BT.any()
        else AdvantageResult(torch.zeros_like(inputs.reward_A))
    )
    if algo.has_user_advantage:
        _check_user_result(result, inputs, algo)
    advantage = result.advantage
    if algo.egpo.lam:
        assert advantage.ndim == 1, "check_algo lets EGPO change trajectories' advantages only"
        advantage, egpo_metrics = _add_egpo_bonus(inputs, advantage, algo.egpo, cot_marker_ids)
        metrics |= egpo_metrics
    if advantage.ndim == 1:
        advantage_B = advantage[rows.trajectory_B]
        advantage = (
            estimators.arpo_hard(advantage_B, batch.tree_token_BT, mask_BT)
            if traits.averages_shared_tokens
            else estimators.broadcast(advantage_B, mask_BT)
        )
    if algo.has_user_advantage:
        advantage = _check_user_values(advantage, mask_BT, algo)
    mask_BT = batch.mask_BT
    if algo.entropy_advantage_weight:
        advantage, aepo_metrics = _scale_by_entropy(batch, advantage, algo.entropy_advantage_weight)
        metrics |= aepo_metrics
    metrics["advantage/abs_mean"] = float(masked_mean(advantage.abs(), mask_BT))
    metrics["advantage/zero_fraction"] = _masked_fraction(advantage == 0, mask_BT)
    if result.return_BT is not None:
        batch = batch.with_fields(return_BT=result.return_BT)
    return batch.with_fields(advantage_BT=advantage.float()), metrics


def _has_no_baseline(batch: TrainBatch, rows: TrajectoryRows, *, greedy: bool) -> torch.Tensor:
    """Return whether a trained trajectory has nothing that it can be compared with, [A] bool.

    Args:
        batch: The batch.
        rows: Its trajectories.
        greedy: Whether a greedy answer is the baseline, and the group only where that failed.
    """
    _, size_A = estimators.group_index_and_size(batch.group_B[rows.first_row_A])
    is_trained_A = rows.sum_rows(batch.mask_BT.sum(1)) > 0
    is_alone_A = (size_A == 1) & is_trained_A
    if greedy:
        assert batch.baseline_B is not None, "_require_inputs requires it"
        is_alone_A &= batch.baseline_B[rows.first_row_A].isnan()
    return is_alone_A


def _ref_kl(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:
    """Return the KL to the reference, [B, T] nats, 0 on untrained tokens."""
    key = "algo.kl_placement=reward"
    logp_BT = _require_field(batch, "old_logp_BT", key)
    ref_BT = _require_field(batch, "ref_logp_BT", key)
    return kl_penalty(logp_BT, ref_BT, algo.kl_estimator).masked_fill(~batch.mask_BT, 0.0)


def _require_inputs(batch: TrainBatch, algo: AlgoConfig) -> None:
    """Raise `ValueError` if the batch lacks a field that the estimator's traits require."""
    key = f"algo.advantage={algo.advantage}"
    if algo.estimator.needs_critic:
        _require_field(batch, "value_BT", key, "a batch that no critic has seen")
    if algo.estimator.needs_greedy_baseline:
        _require_field(batch, "baseline_B", key, "a batch without greedy answers")


def _check_user_result(result: object, inputs: AdvantageInputs, algo: AlgoConfig) -> None:
    """Raise `ValueError` unless a user's function returned tensors of the right shapes."""
    key, traits = f"algo.advantage={algo.advantage}", algo.estimator
    got: object = type(result).__name__
    token_shape = tuple(inputs.batch.mask_BT.shape)
    shapes: dict[tuple[int, ...], str] = {
        (len(inputs.rows.first_row_A),): "one advantage per trajectory"
    }
    if not traits.per_trajectory:
        shapes[token_shape] = "one per token"
    if isinstance(result, AdvantageResult):
        got = _shape_or_type(result.advantage)
    if got not in shapes:
        expected = ", or ".join(f"{shape}, {what}" for shape, what in shapes.items())
        raise InputError(
            f"result of {key}",
            got,
            f"an AdvantageResult with a tensor of shape {expected}",
            "a tensor in place of an AdvantageResult, or another shape",
        )
    assert isinstance(result, AdvantageResult)
    if traits.needs_critic and _shape_or_type(result.return_BT) != token_shape:
        expected = f"a tensor of shape {token_shape}, the targets of the critic that it needs"
        raise InputError(f"return_BT of {key}", _shape_or_type(result.return_BT), expected)


def _shape_or_type(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _check_user_values(
    advantage_BT: torch.Tensor, mask_BT: torch.Tensor, algo: AlgoConfig
) -> torch.Tensor:
    """Return a user's advantages, [B, T] float32, 0 on untrained tokens.

    Raises:
        ValueError: They are not finite on a trained token.
    """
    advantage_BT = torch.where(mask_BT, advantage_BT.detach().float(), 0.0)
    if num_bad := int((~advantage_BT.isfinite()).sum()):
        raise InputError(
            f"result of algo.advantage={algo.advantage}",
            f"{num_bad} numbers that are not finite for trained tokens",
            "none",
            "a division by the spread of equal rewards",
        )
    return advantage_BT


def _add_egpo_bonus(
    inputs: AdvantageInputs,
    advantage_A: torch.Tensor,
    settings: EgpoConfig,
    cot_marker_ids: CotMarkerIds | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantages with EGPO's bonus, [A], and its metrics."""
    batch, rows = inputs.batch, inputs.rows
    entropy_BT = _require_field(batch, "entropy_BT", f"algo.egpo.lam={settings.lam}")
    mask_AL = rows.concat_rows(batch.mask_BT, batch.length_B)
    cot_AL = mask_AL
    if settings.cot_blocks is not CotBlocks.response:
        if cot_marker_ids is None:
            expected = (
                "the token ids of algo.egpo.cot_markers with "
                f"algo.egpo.cot_blocks={settings.cot_blocks}"
            )
            raise InputError("cot_marker_ids", None, expected, "they were not tokenized")
        cot_AL = _locate_cot(inputs, cot_marker_ids, str(settings.cot_blocks))
    entropy_A = cot_entropy(rows.concat_rows(entropy_BT, batch.length_B), cot_AL)
    egpo_advantage_A = egpo(advantage_A, entropy_A, lam=settings.lam, alpha=settings.alpha)
    trained_A = mask_AL.any(1)
    bounded_A = entropy_A > advantage_A.abs() / settings.alpha
    return egpo_advantage_A, {
        "egpo/cot_entropy": float(masked_mean(entropy_A, trained_A)),
        "egpo/no_cot_fraction": _masked_fraction(~cot_AL.any(1), trained_A),
        "egpo/bonus_mean": float(masked_mean(egpo_advantage_A - advantage_A, trained_A)),
        "egpo/clipfrac": _masked_fraction(bounded_A, trained_A),
    }


def _locate_cot(inputs: AdvantageInputs, cot_marker_ids: CotMarkerIds, blocks: str) -> torch.Tensor:
    """Return the mask of the chain of thought, [A, L], also of one that a prompt has opened."""
    batch, rows = inputs.batch, inputs.rows
    start, end = cot_marker_ids
    # The end of its prompt stands before each row while the openings are looked for.
    size = len(start) + MAX_TOKENS_BEHIND_OPENING
    tails = [[-1] * (size - len(ids[-size:])) + list(ids[-size:]) for ids in batch.prompt_ids]
    token_BT = torch.cat([torch.tensor(tails, dtype=torch.int64), batch.response_BT], dim=1)
    mask_BT = pad(batch.mask_BT, (size, 0))
    opened_BT = opened_turns(token_BT, mask_BT, start_id=start, end_id=end)[:, size:]
    token_AL, mask_AL, opened_AL = (
        rows.concat_rows(grid_BT, batch.length_B)
        for grid_BT in (batch.response_BT, batch.mask_BT, opened_BT)
    )
    return cot_mask(
        token_AL, mask_AL, start_id=start, end_id=end, blocks=blocks, opened_BT=opened_AL
    )


def _scale_by_entropy(
    batch: TrainBatch, advantage_BT: torch.Tensor, weight: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantages with AEPO's scale, [B, T], and its metric."""
    entropy_BT = _require_field(batch, "entropy_BT", f"algo.entropy_advantage_weight={weight}")
    scaled_BT = entropy_scaled(advantage_BT, entropy_BT, batch.mask_BT, weight=weight)
    is_flipped_BT = advantage_BT * scaled_BT < 0
    return scaled_BT, {"aepo/sign_flip_fraction": _masked_fraction(is_flipped_BT, batch.mask_BT)}


def add_importance_weights(
    batch: TrainBatch, algo: AlgoConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `importance_weight_BT` according to `algo.rollout_correction`.

    Returns:
        The batch, unchanged without a correction, and metrics: `rollout_correction/weight_mean`
        after the cap, and `rollout_correction/capped_fraction` of the trained tokens.
    """
    if algo.rollout_correction is RolloutCorrection.none:
        return batch, {}
    level, _, rule = algo.rollout_correction.partition("_")
    weight_BT, info = importance_weights(
        _require_field(batch, "old_logp_BT", f"algo.rollout_correction={algo.rollout_correction}"),
        batch.rollout_logp_BT,
        _scored_mask(batch),
        level=level,
        mode=IMPORTANCE_WEIGHT_MODES[rule],
        cap=algo.rollout_correction_cap,
    )
    metrics = {
        f"rollout_correction/{name}": float(info[name])
        for name in ("weight_mean", "capped_fraction")
    }
    return batch.with_fields(importance_weight_BT=weight_BT), metrics


def check_zero_mismatch(batch: TrainBatch) -> None:
    """Raise `ValueError` unless engine and policy agree bit by bit on all trained tokens."""
    old_logp_BT = _require_field(batch, "old_logp_BT", "model.zero_mismatch=true")
    differs_BT = (old_logp_BT != batch.rollout_logp_BT) & batch.mask_BT
    if not differs_BT.any():
        return
    row, position = (int(index) for index in differs_BT.nonzero()[0])
    engine, policy = float(batch.rollout_logp_BT[row, position]), float(old_logp_BT[row, position])
    num_differing, num_tokens = int(differs_BT.sum()), int(batch.mask_BT.sum())
    raise InputError(
        f"model.zero_mismatch: log-prob of token {position} of row {row}",
        engine,
        f"{policy!r} as in the policy; {num_differing} of {num_tokens} differ",
        "an operation of the engine or the policy that does not compute with `numerics`, which "
        "tools/find_mismatch.py model.zero_mismatch=true finds",
    )


def mismatch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return how far engine and policy are apart on tokens that both scored, under `mismatch/`.

    The metrics of `algo.correction.logprob_mismatch`, on log-probs and probabilities, and the mean
    and maximum absolute difference of the entropies in nats; none if there is no such token.
    """
    assert batch.old_logp_BT is not None and batch.entropy_BT is not None
    mask_BT = _scored_mask(batch)
    if not mask_BT.any():
        return {}
    entropy_gap_BT = (batch.rollout_entropy_BT - batch.entropy_BT).abs().masked_fill(~mask_BT, 0.0)
    metrics = logprob_mismatch(batch.old_logp_BT, batch.rollout_logp_BT, mask_BT)
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()} | {
        "mismatch/entropy_mean_abs": float(masked_mean(entropy_gap_BT, mask_BT)),
        "mismatch/entropy_max_abs": float(entropy_gap_BT.max()),
    }


def _scored_mask(batch: TrainBatch) -> torch.Tensor:
    """Return the tokens to train on in rows that the policy has scored, [B, T] bool."""
    if batch.is_scored_B is None:
        return batch.mask_BT
    return batch.mask_BT & batch.is_scored_B.unsqueeze(1)


def _masked_fraction(condition: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(condition.float(), mask))


def _require_field(
    batch: TrainBatch,
    name: str,
    key: str,
    cause: str = "compute_log_probs was not called, or there is no reference",
) -> torch.Tensor:
    """Return an optional field of the batch; raise `ValueError` if it is None."""
    value: torch.Tensor | None = getattr(batch, name)
    if value is None:
        raise InputError(name, None, f"values with {key}", cause)
    return value
