"""Advantages of a batch, per token, computed after the policy and the reference have scored it.

    reward   r - kl_coef * sum of KL over the trajectory's tokens      algo.kl_placement=reward
    A        the estimator of algo.advantage within a prompt's group, or a user's function
    A        + lam * clip(H, -|A| / alpha, |A| / alpha)                algo.egpo.lam > 0
    A_t      the trajectory's A, or averaged over shared tokens of the tree (arpo_hard)
    A_t      * (1 + weight * z of the token's entropy)         algo.entropy_advantage_weight > 0

The steps are applied in this order, with the formulas of `algo`. `reinforce_plus_plus` and `gae`
work on tokens from the start and put each token's KL into that token's reward. `gae` also uses the
critic's values, returns the critic's targets, and is whitened under `algo.norm_by_std`. Entropies
and log-probs are those of the policy's own forward pass at the sampling temperature; if one is
missing, that is an error.

A trajectory counts once, however many rows it has (`TrainBatch.trajectory_B`): its rows share one
advantage, one sum of KL and one chain of thought, and their values are read as one sequence, so
that the value after a row is that of the next row's first token. A failed trajectory has no
trained token and a group of its own, so it changes nothing.

Shape suffixes: B rows, A trajectories, T response positions, L positions of a whole trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.aepo import entropy_scaled
from mega_agentrl.algo.correction import importance_weights, logprob_mismatch
from mega_agentrl.algo.egpo import cot_entropy, cot_mask, egpo
from mega_agentrl.algo.kl import apply_kl_penalty, kl_penalty
from mega_agentrl.algo.masking import masked_mean, masked_sum, masked_whiten
from mega_agentrl.config.enums import AdvantageEstimator, CotBlocks, KlPlacement, RolloutCorrection
from mega_agentrl.train.user_advantage import compute_user_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig, EgpoConfig
    from mega_agentrl.types.batch import TrainBatch

CotMarkerIds = tuple[tuple[int, ...], tuple[int, ...]]

IMPORTANCE_WEIGHT_MODES = {"truncate": "truncated", "mask": "masked"}


def add_importance_weights(
    batch: TrainBatch, algo: AlgoConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `importance_weight_BT` as `algo.rollout_correction` says.

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
        batch.mask_BT,
        level=level,
        mode=IMPORTANCE_WEIGHT_MODES[rule],
        cap=algo.rollout_correction_cap,
    )
    metrics = {
        f"rollout_correction/{name}": float(info[name])
        for name in ("weight_mean", "capped_fraction")
    }
    return batch.with_fields(importance_weight_BT=weight_BT), metrics


def mismatch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return how far the engine and the policy are apart on trained tokens, under `mismatch/`.

    The metrics of `algo.correction.logprob_mismatch`, on log-probs and probabilities, and the mean
    and maximum absolute difference of the entropies in nats.
    """
    assert batch.old_logp_BT is not None and batch.entropy_BT is not None
    mask_BT = batch.mask_BT
    entropy_gap_BT = (batch.rollout_entropy_BT - batch.entropy_BT).abs().masked_fill(~mask_BT, 0.0)
    metrics = logprob_mismatch(batch.old_logp_BT, batch.rollout_logp_BT, mask_BT)
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()} | {
        "mismatch/entropy_mean_abs": float(masked_mean(entropy_gap_BT, mask_BT)),
        "mismatch/entropy_max_abs": float(entropy_gap_BT.max()),
    }


def add_advantages(
    batch: TrainBatch, algo: AlgoConfig, *, kl_coef: float, cot_marker_ids: CotMarkerIds | None
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `advantage_BT` [B, T] float32, 0 on untrained tokens; with `gae` also `return_BT`.

    Args:
        batch: A batch with rewards, log-probs and entropies.
        algo: Settings of the algorithm.
        kl_coef: Weight of a KL in the reward. It replaces `algo.kl_coef`, which is only its start.
        cot_marker_ids: Token ids that open and close the chain of thought; only read with EGPO.

    Returns:
        The batch and metrics. Over trained tokens: `advantage/abs_mean`, `advantage/zero_fraction`,
        `advantage/ref_kl` (nats per token, with a KL in the reward) and `aepo/sign_flip_fraction`
        (with AEPO's scale). Over trajectories, with EGPO: `egpo/cot_entropy` (nats),
        `egpo/no_cot_fraction`, `egpo/bonus_mean` and `egpo/clipfrac`, the fraction whose entropy is
        above the bound.

    Raises:
        ValueError: A field that the settings need is missing.
    """
    mask_BT, trajectory_rows = batch.mask_BT, _TrajectoryRows.from_batch(batch)
    kl_BT, metrics = None, {}
    if algo.kl_placement is KlPlacement.reward and algo.kl_coef > 0:
        why = "algo.kl_placement=reward"
        logp_BT, ref_BT = (
            _require_field(batch, "old_logp_BT", why),
            _require_field(batch, "ref_logp_BT", why),
        )
        kl_BT = kl_penalty(logp_BT, ref_BT, algo.kl_estimator).masked_fill(~mask_BT, 0.0)
        metrics["advantage/ref_kl"] = float(masked_mean(kl_BT, mask_BT))
    if algo.has_user_advantage:
        advantage_BT = compute_user_advantage(batch, algo)
    elif algo.advantage is AdvantageEstimator.gae:
        assert not algo.egpo.lam, "check_algo lets EGPO change trajectories' advantages only"
        advantage_BT, return_BT = _gae_advantages(batch, trajectory_rows, kl_BT, kl_coef, algo)
        batch = batch.with_fields(return_BT=return_BT)
    elif algo.advantage is AdvantageEstimator.reinforce_plus_plus:
        assert not algo.egpo.lam, "check_algo lets EGPO change trajectories' advantages only"
        reward_BT = _token_rewards(batch, trajectory_rows, kl_BT, kl_coef)
        advantage_BT = estimators.reinforce_plus_plus(reward_BT, mask_BT)
    else:
        reward_A = batch.reward_B[trajectory_rows.first_row_A]
        if kl_BT is not None:
            reward_A = reward_A - kl_coef * trajectory_rows.sum_rows(masked_sum(kl_BT, mask_BT, 1))
        advantage_A = _trajectory_advantages(batch, trajectory_rows, reward_A, algo)
        if algo.egpo.lam:
            advantage_A, egpo_metrics = _add_egpo_bonus(
                batch, trajectory_rows, advantage_A, algo.egpo, cot_marker_ids
            )
            metrics |= egpo_metrics
        advantage_BT = _broadcast_to_tokens(batch, advantage_A[trajectory_rows.trajectory_B], algo)
    if algo.entropy_advantage_weight:
        entropy_BT = _require_field(
            batch, "entropy_BT", f"algo.entropy_advantage_weight={algo.entropy_advantage_weight}"
        )
        before_BT, weight = advantage_BT, algo.entropy_advantage_weight
        advantage_BT = entropy_scaled(before_BT, entropy_BT, mask_BT, weight=weight)
        metrics["aepo/sign_flip_fraction"] = _masked_fraction(before_BT * advantage_BT < 0, mask_BT)
    metrics["advantage/abs_mean"] = float(masked_mean(advantage_BT.abs(), mask_BT))
    metrics["advantage/zero_fraction"] = _masked_fraction(advantage_BT == 0, mask_BT)
    return batch.with_fields(advantage_BT=advantage_BT.float()), metrics


@dataclass(frozen=True, slots=True)
class _TrajectoryRows:
    """Assignment of the rows of a batch to trajectories."""

    first_row_A: torch.Tensor
    """[A] int64, the first row of each trajectory."""
    trajectory_B: torch.Tensor
    """[B] int64, the number of each row's trajectory."""
    is_one_row_each: bool
    """Whether every trajectory is a single row."""

    @classmethod
    def from_batch(cls, batch: TrainBatch) -> _TrajectoryRows:
        """Number the trajectories in the order of their first rows."""
        if batch.trajectory_B is None:
            row_B = torch.arange(batch.num_rows)
            return cls(row_B, row_B, is_one_row_each=True)
        first: dict[int, int] = {}
        for row, owner in enumerate(batch.trajectory_B.tolist()):
            first.setdefault(owner, row)
        place = {owner: number for number, owner in enumerate(first)}
        trajectory_B = torch.tensor([place[owner] for owner in batch.trajectory_B.tolist()])
        return cls(torch.tensor(list(first.values())), trajectory_B, is_one_row_each=False)

    def sum_rows(self, value_B: torch.Tensor) -> torch.Tensor:
        """Return the sum over each trajectory's rows, [A]."""
        return value_B.new_zeros(len(self.first_row_A)).index_add(0, self.trajectory_B, value_B)

    def sum_later_rows(self, value_B: torch.Tensor) -> torch.Tensor:
        """Return the sum over the later rows of the same trajectory, [B]."""
        if self.is_one_row_each:
            return torch.zeros_like(value_B)
        so_far = [0.0] * len(self.first_row_A)
        sums: list[float] = []
        for place, value in zip(
            self.trajectory_B.flip(0).tolist(), value_B.flip(0).tolist(), strict=True
        ):
            sums.append(so_far[place])
            so_far[place] += value
        return value_B.new_tensor(sums).flip(0)

    def concat_rows(self, grid_BT: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of each trajectory, each followed by one zero position, [A, L]."""
        if self.is_one_row_each:
            return grid_BT
        pieces: list[list[torch.Tensor]] = [[] for _ in self.first_row_A]
        for row, place in enumerate(self.trajectory_B.tolist()):
            pieces[place].append(pad(grid_BT[row, : int(length_B[row])], (0, 1)))
        return pad_sequence([torch.cat(rows) for rows in pieces], batch_first=True)

    def split_rows(self, grid_AL: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        """Undo `concat_rows`: [B, T] with 0 after the end of each row."""
        if self.is_one_row_each:
            return grid_AL
        grid_BT = grid_AL.new_zeros(batch.response_BT.shape)
        start = [0] * len(self.first_row_A)
        lengths = batch.length_B.tolist()
        for row, place in enumerate(self.trajectory_B.tolist()):
            stop = start[place] + lengths[row]
            grid_BT[row, : lengths[row]] = grid_AL[place, start[place] : stop]
            start[place] = stop + 1
        return grid_BT


def _trajectory_advantages(
    batch: TrainBatch, trajectory_rows: _TrajectoryRows, reward_A: torch.Tensor, algo: AlgoConfig
) -> torch.Tensor:
    """Return the advantage of each trajectory, [A]."""
    group_A = batch.group_B[trajectory_rows.first_row_A]
    kind = AdvantageEstimator(algo.advantage)
    match kind:
        case AdvantageEstimator.grpo | AdvantageEstimator.arpo_hard:
            return estimators.grpo(reward_A, group_A, norm_by_std=algo.norm_by_std)
        case AdvantageEstimator.rloo:
            return estimators.rloo(reward_A, group_A)
        case AdvantageEstimator.remax:
            return _remax_advantages(batch, trajectory_rows, reward_A)
        case AdvantageEstimator.reinforce_plus_plus_baseline:
            # The mean of a group is over its trajectories, the whitening over tokens of all rows.
            centred_A = estimators.grpo(reward_A, group_A, norm_by_std=False)
            grid_BT = estimators.broadcast(centred_A[trajectory_rows.trajectory_B], batch.mask_BT)
            white_BT = masked_whiten(grid_BT, batch.mask_BT)
            num_A = trajectory_rows.sum_rows(batch.mask_BT.sum(1)).clamp(min=1)
            return trajectory_rows.sum_rows(masked_sum(white_BT, batch.mask_BT, 1)) / num_A
        case AdvantageEstimator.reinforce_plus_plus | AdvantageEstimator.gae:
            raise AssertionError(f"{algo.advantage} has no advantage of whole trajectories")
        case _:
            assert_never(kind)


def _remax_advantages(
    batch: TrainBatch, trajectory_rows: _TrajectoryRows, reward_A: torch.Tensor
) -> torch.Tensor:
    """Return the reward minus that of the greedy answer, [A] (ReMax, arXiv 2310.10505).

    If the greedy answer failed, the baseline is the mean of the group's other rewards. Either
    baseline is independent of what the trajectory itself did.
    """
    if batch.baseline_B is None:
        raise ValueError(
            "baseline_B: got None, expected the rewards of greedy answers with "
            "algo.advantage=remax; probable cause: groups that were collected without them"
        )
    greedy_A = batch.baseline_B[trajectory_rows.first_row_A]
    others_A = reward_A - estimators.rloo(reward_A, batch.group_B[trajectory_rows.first_row_A])
    return estimators.remax(reward_A, torch.where(greedy_A.isnan(), others_A, greedy_A))


def _gae_advantages(
    batch: TrainBatch,
    trajectory_rows: _TrajectoryRows,
    kl_BT: torch.Tensor | None,
    kl_coef: float,
    algo: AlgoConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantage and return, [B, T] each.

    The last trained token of a trajectory carries its reward.
    """
    if batch.value_BT is None:
        raise ValueError(
            "value_BT: got None, expected a critic's values with algo.advantage=gae; probable "
            "cause: a batch that no critic has seen"
        )
    mask_AL = trajectory_rows.concat_rows(batch.mask_BT, batch.length_B)
    value_AL = trajectory_rows.concat_rows(batch.value_BT, batch.length_B)
    reward_A = batch.reward_B[trajectory_rows.first_row_A]
    last_A = mask_AL.size(1) - 1 - mask_AL.flip(1).int().argmax(1)
    reward_AL = torch.zeros_like(value_AL).scatter(1, last_A.unsqueeze(1), reward_A.unsqueeze(1))
    if kl_BT is not None:
        kl_AL = trajectory_rows.concat_rows(kl_BT, batch.length_B)
        reward_AL = apply_kl_penalty(reward_AL, kl_AL, mask_AL, coef=kl_coef)
    advantage_AL, return_AL = estimators.gae(
        reward_AL, value_AL, mask_AL, gamma=algo.gamma, lam=algo.lam
    )
    advantage_BT = trajectory_rows.split_rows(advantage_AL, batch)
    if algo.norm_by_std:
        advantage_BT = masked_whiten(advantage_BT, batch.mask_BT)
    return advantage_BT, trajectory_rows.split_rows(return_AL, batch).float()


def _broadcast_to_tokens(
    batch: TrainBatch, advantage_B: torch.Tensor, algo: AlgoConfig
) -> torch.Tensor:
    """Return the advantage of each token, [B, T].

    It is the trajectory's, or with `arpo_hard` the mean over the trajectories that share the token.
    """
    if algo.advantage is AdvantageEstimator.arpo_hard:
        return estimators.arpo_hard(advantage_B, batch.node_BT, batch.mask_BT)
    return estimators.broadcast(advantage_B, batch.mask_BT)


def _token_rewards(
    batch: TrainBatch, trajectory_rows: _TrajectoryRows, kl_BT: torch.Tensor | None, kl_coef: float
) -> torch.Tensor:
    """Return the reward of each token, [B, T]; its sums from the right are the returns.

    The last trained token of a row carries the trajectory's reward minus the KL of the later rows.
    """
    mask_BT, reward_B = batch.mask_BT, batch.reward_B
    if kl_BT is not None:
        reward_B = reward_B - kl_coef * trajectory_rows.sum_later_rows(
            masked_sum(kl_BT, mask_BT, 1)
        )
    last_B = mask_BT.size(1) - 1 - mask_BT.flip(1).int().argmax(1)
    empty_BT = torch.zeros_like(batch.rollout_logp_BT)
    reward_BT = empty_BT.scatter(1, last_B.unsqueeze(1), reward_B.unsqueeze(1))
    if kl_BT is None:
        return reward_BT
    return apply_kl_penalty(reward_BT, kl_BT, mask_BT, coef=kl_coef)


def _add_egpo_bonus(
    batch: TrainBatch,
    trajectory_rows: _TrajectoryRows,
    advantage_A: torch.Tensor,
    settings: EgpoConfig,
    cot_marker_ids: CotMarkerIds | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantages with EGPO's bonus, [A], and its metrics."""
    grid_BT = _require_field(batch, "entropy_BT", f"algo.egpo.lam={settings.lam}")
    mask_AL = trajectory_rows.concat_rows(batch.mask_BT, batch.length_B)
    cot_AL = mask_AL
    if settings.cot_blocks is not CotBlocks.response:
        if cot_marker_ids is None:
            raise ValueError(
                f"add_advantages: got no cot_marker_ids with "
                f"algo.egpo.cot_blocks={settings.cot_blocks}; expected the token ids of "
                "algo.egpo.cot_markers; probable cause: they were not tokenized"
            )
        token_AL = trajectory_rows.concat_rows(batch.response_BT, batch.length_B)
        start, end = cot_marker_ids
        cot_AL = cot_mask(
            token_AL, mask_AL, start_id=start, end_id=end, blocks=str(settings.cot_blocks)
        )
    entropy_A = cot_entropy(trajectory_rows.concat_rows(grid_BT, batch.length_B), cot_AL)
    egpo_advantage_A = egpo(advantage_A, entropy_A, lam=settings.lam, alpha=settings.alpha)
    trained_A = mask_AL.any(1)
    bounded_A = entropy_A > advantage_A.abs() / settings.alpha
    return egpo_advantage_A, {
        "egpo/cot_entropy": float(masked_mean(entropy_A, trained_A)),
        "egpo/no_cot_fraction": _masked_fraction(~cot_AL.any(1), trained_A),
        "egpo/bonus_mean": float(masked_mean(egpo_advantage_A - advantage_A, trained_A)),
        "egpo/clipfrac": _masked_fraction(bounded_A, trained_A),
    }


def _masked_fraction(condition: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(condition.float(), mask))


def _require_field(batch: TrainBatch, name: str, why: str) -> torch.Tensor:
    """Return a field that the log-prob pass fills; raise `ValueError` if it is None."""
    value: torch.Tensor | None = getattr(batch, name)
    if value is None:
        raise ValueError(
            f"{name}: got None, expected the values of the log-prob pass with {why}; probable "
            "cause: compute_log_probs was not called, or there is no reference"
        )
    return value
