"""Advantages of a batch, per token, computed after the policy and the reference have scored it.

    reward   r - kl_coef * sum of KL over the trajectory's tokens      algo.kl_placement=reward
    A        the estimator of algo.advantage: a registered one, or a user's function
    A        + lam * clip(H, -|A| / alpha, |A| / alpha)                algo.egpo.lam > 0
    A_t      the trajectory's A, or averaged over shared tokens of the tree (arpo_hard)
    A_t      * (1 + weight * z of the token's entropy)         algo.entropy_advantage_weight > 0

The steps are applied in this order, with the formulas of `algo`. `reinforce_plus_plus` and `gae`
work on tokens from the start and put each token's KL into that token's reward. Entropies and
log-probs are those of the policy's own forward pass at the sampling temperature; if one is missing,
that is an error.

A trajectory counts once, however many rows it has (`trajectory_rows`): its rows share one
advantage, one sum of KL and one chain of thought, and their values are read as one sequence, so
that the value after a row is that of the next row's first token. A failed trajectory has no
trained token and a group of its own, so it changes nothing.

Shape suffixes: B rows, A trajectories, T response positions, L positions of a whole trajectory.

An estimator is a function with the decorator `register_advantage`, which declares its traits
(`EstimatorTraits`); its keyword-only arguments are its options (`algo.advantage_options`). Both are
read from the source before a run starts (`config.declarations`), so traits and defaults must be
literals. To add one:
1. a `register_advantage` function here, or in a file of your own; a formula with published numbers
   belongs into `algo/advantage.py`
2. its hand-worked test in `tests/train/test_advantages.py`
3. a preset in `configs/algo/`, and `tools/make_config_reference.py`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, cast

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.aepo import entropy_scaled
from mega_agentrl.algo.correction import importance_weights, logprob_mismatch
from mega_agentrl.algo.egpo import cot_entropy, cot_mask, egpo
from mega_agentrl.algo.kl import apply_kl_penalty, kl_penalty
from mega_agentrl.algo.masking import masked_mean, masked_sum, masked_whiten
from mega_agentrl.config.algorithm_traits import ESTIMATORS, EstimatorTraits
from mega_agentrl.config.enums import CotBlocks, KlPlacement, RolloutCorrection
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.ranges import Range
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.train.trajectory_rows import TrajectoryRows

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig, EgpoConfig
    from mega_agentrl.types.batch import TrainBatch

CotMarkerIds = tuple[tuple[int, ...], tuple[int, ...]]

IMPORTANCE_WEIGHT_MODES = {"truncate": "truncated", "mask": "masked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator computes from."""

    batch: TrainBatch
    """A batch with rewards, log-probs and entropies, and with a critic also values."""
    rows: TrajectoryRows
    """The trajectories of the batch."""
    kl_BT: torch.Tensor | None = None
    """[B, T] KL to the reference in nats, 0 on untrained tokens; None unless it is in the reward.
    """
    kl_coef: float = 0.0
    """Current weight of a KL in the reward."""

    @property
    def group_A(self) -> torch.Tensor:
        """[A] group of each trajectory."""
        return self.batch.group_B[self.rows.first_row_A]

    @property
    def reward_A(self) -> torch.Tensor:
        """[A] reward of each trajectory, minus the weighted KL of all its tokens."""
        reward_A = self.batch.reward_B[self.rows.first_row_A]
        if self.kl_BT is None:
            return reward_A
        kl_A = self.rows.sum_rows(masked_sum(self.kl_BT, self.batch.mask_BT, 1))
        return reward_A - self.kl_coef * kl_A


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a batch."""

    advantage: torch.Tensor
    """[A], one per trajectory, or [B, T], one per token, ignored on untrained tokens."""
    return_BT: torch.Tensor | None = None
    """[B, T] float32 targets of the critic."""


AdvantageFunction = Callable[..., AdvantageResult]
"""A function of `AdvantageInputs`, `AlgoConfig` and its options."""

_REGISTERED: dict[str, AdvantageFunction] = {}


def register_advantage(
    name: str, **traits: bool
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register the decorated function as the estimator `name` with traits of `EstimatorTraits`."""
    EstimatorTraits(**traits)  # refuses unknown ones

    def register(function: AdvantageFunction) -> AdvantageFunction:
        _REGISTERED[name] = function
        return function

    return register


def find_advantage(algo: AlgoConfig) -> AdvantageFunction:
    """Return the estimator of `algo.advantage`; a user's file is imported on the first call."""
    if algo.has_user_advantage:
        return load_user_advantage(algo.advantage)
    return _REGISTERED[algo.advantage]


@cache
def load_user_advantage(reference: str) -> AdvantageFunction:
    """Load a user's function, `algo.advantage=/folder/file.py:function`.

    It runs on the driver, in the process of the training loop.

    Raises:
        ConfigError: There is no such function.
    """
    key, expected = ESTIMATORS.key, ESTIMATORS.expected
    found = load_user_object(reference, key, expected, default_name=ESTIMATORS.default_name)
    if not callable(found):
        raise ConfigError(key, reference, expected, f"got {found!r}")
    return cast("AdvantageFunction", found)


@register_advantage("grpo", needs_groups=True, per_trajectory=True, supports_kl_in_reward=True)
def _grpo(
    inputs: AdvantageInputs, algo: AlgoConfig, *, norm_by_std: bool = True
) -> AdvantageResult:
    """GRPO, the reward relative to the group (arXiv 2402.03300).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        norm_by_std: Divide by the standard deviation of the group; false is Dr. GRPO.
    """
    return AdvantageResult(
        estimators.grpo(inputs.reward_A, inputs.group_A, norm_by_std=norm_by_std)
    )


@register_advantage(
    "arpo_hard",
    needs_groups=True,
    per_trajectory=True,
    averages_shared_tokens=True,
    supports_kl_in_reward=True,
)
def _arpo_hard(
    inputs: AdvantageInputs, algo: AlgoConfig, *, norm_by_std: bool = True
) -> AdvantageResult:
    """ARPO's hard estimator, GRPO averaged over the paths that share a token (arXiv 2507.19849).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        norm_by_std: Divide by the standard deviation of the group.
    """
    return _grpo(inputs, algo, norm_by_std=norm_by_std)


@register_advantage("rloo", needs_groups=True, per_trajectory=True, supports_kl_in_reward=True)
def _rloo(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """RLOO, the reward minus the mean of the group's other rewards (arXiv 2402.14740)."""
    return AdvantageResult(estimators.rloo(inputs.reward_A, inputs.group_A))


@register_advantage(
    "remax", needs_greedy_baseline=True, per_trajectory=True, supports_kl_in_reward=True
)
def _remax(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """ReMax, the reward minus that of a greedy answer (arXiv 2310.10505).

    If the greedy answer failed, the baseline is the mean of the group's other rewards. Either
    baseline is independent of what the trajectory itself did.
    """
    assert inputs.batch.baseline_B is not None, "add_advantages requires it"
    reward_A, greedy_A = inputs.reward_A, inputs.batch.baseline_B[inputs.rows.first_row_A]
    others_A = reward_A - estimators.rloo(reward_A, inputs.group_A)
    return AdvantageResult(
        estimators.remax(reward_A, torch.where(greedy_A.isnan(), others_A, greedy_A))
    )


@register_advantage(
    "reinforce_plus_plus_baseline",
    needs_groups=True,
    per_trajectory=True,
    supports_kl_in_reward=True,
)
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """REINFORCE++ with the mean of the group as baseline, whitened over the batch."""
    mask_AL = inputs.rows.concat_rows(inputs.batch.mask_BT, inputs.batch.length_B)
    white_AL = estimators.reinforce_plus_plus_baseline(inputs.reward_A, inputs.group_A, mask_AL)
    return AdvantageResult(masked_mean(white_AL, mask_AL, 1))


@register_advantage("reinforce_plus_plus", equal_without_kl=True, supports_kl_in_reward=True)
def _reinforce_plus_plus(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """REINFORCE++, returns whitened over the batch, without groups (arXiv 2501.03262).

    The returns of a row include the KL of the trajectory's later rows.
    """
    batch, kl_BT = inputs.batch, inputs.kl_BT
    reward_B = batch.reward_B
    if kl_BT is not None:
        later_kl_B = inputs.rows.sum_later_rows(masked_sum(kl_BT, batch.mask_BT, 1))
        reward_B = reward_B - inputs.kl_coef * later_kl_B
    reward_BT = _token_rewards(
        reward_B, batch.mask_BT, kl_BT, inputs.kl_coef, batch.rollout_logp_BT.dtype
    )
    return AdvantageResult(estimators.reinforce_plus_plus(reward_BT, batch.mask_BT))


@register_advantage("gae", needs_critic=True, supports_kl_in_reward=True)
def _gae(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    gamma: Annotated[float, Range(at_least=0, at_most=1)] = 1.0,
    lam: Annotated[float, Range(at_least=0, at_most=1)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """Generalized advantage estimation, with a critic (arXiv 1506.02438).

    The rows of a trajectory are one sequence.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        gamma: Discount factor.
        lam: GAE's lambda; with gamma and lam 1 the advantage is the return minus the value.
        norm_by_std: Whiten the advantages of all trained tokens.
    """
    batch, rows = inputs.batch, inputs.rows
    assert batch.value_BT is not None, "add_advantages requires it"
    mask_AL = rows.concat_rows(batch.mask_BT, batch.length_B)
    value_AL = rows.concat_rows(batch.value_BT, batch.length_B)
    kl_AL = None if inputs.kl_BT is None else rows.concat_rows(inputs.kl_BT, batch.length_B)
    reward_AL = _token_rewards(
        batch.reward_B[rows.first_row_A], mask_AL, kl_AL, inputs.kl_coef, value_AL.dtype
    )
    advantage_AL, return_AL = estimators.gae(reward_AL, value_AL, mask_AL, gamma=gamma, lam=lam)
    advantage_BT = rows.split_rows(advantage_AL, batch)
    if norm_by_std:
        advantage_BT = masked_whiten(advantage_BT, batch.mask_BT)
    return AdvantageResult(advantage_BT, rows.split_rows(return_AL, batch).float())


def _token_rewards(
    reward_B: torch.Tensor,
    mask_BT: torch.Tensor,
    kl_BT: torch.Tensor | None,
    kl_coef: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the reward of each token, [B, T]; its sums from the right are the returns.

    The last trained token of a row carries the row's reward, and each token its own KL.
    """
    last_B = mask_BT.size(1) - 1 - mask_BT.flip(1).int().argmax(1)
    reward_BT = torch.zeros(mask_BT.shape, dtype=dtype)
    reward_BT = reward_BT.scatter(1, last_B.unsqueeze(1), reward_B.unsqueeze(1))
    if kl_BT is None:
        return reward_BT
    return apply_kl_penalty(reward_BT, kl_BT, mask_BT, coef=kl_coef)


def add_advantages(
    batch: TrainBatch, algo: AlgoConfig, *, kl_coef: float, cot_marker_ids: CotMarkerIds | None
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `advantage_BT` [B, T] float32, 0 on untrained tokens; with a critic also `return_BT`.

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
        ValueError: A field that the settings need is missing, or a user's function returns
            something else than finite advantages.
    """
    mask_BT, rows, metrics = batch.mask_BT, TrajectoryRows.from_batch(batch), dict[str, float]()
    kl_BT = None
    if algo.kl_placement is KlPlacement.reward and algo.kl_coef > 0:
        kl_BT = _ref_kl(batch, algo)
        metrics["advantage/ref_kl"] = float(masked_mean(kl_BT, mask_BT))
    inputs = AdvantageInputs(batch=batch, rows=rows, kl_BT=kl_BT, kl_coef=kl_coef)
    traits = algo.estimator
    _require_inputs(batch, algo)
    result = find_advantage(algo)(inputs, algo, **algo.advantage_options)
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
    if algo.entropy_advantage_weight:
        advantage, aepo_metrics = _scale_by_entropy(batch, advantage, algo.entropy_advantage_weight)
        metrics |= aepo_metrics
    metrics["advantage/abs_mean"] = float(masked_mean(advantage.abs(), mask_BT))
    metrics["advantage/zero_fraction"] = _masked_fraction(advantage == 0, mask_BT)
    if result.return_BT is not None:
        batch = batch.with_fields(return_BT=result.return_BT)
    return batch.with_fields(advantage_BT=advantage.float()), metrics


def _ref_kl(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:
    """Return the KL to the reference, [B, T] nats, 0 on untrained tokens."""
    why = "algo.kl_placement=reward"
    logp_BT = _require_field(batch, "old_logp_BT", why)
    ref_BT = _require_field(batch, "ref_logp_BT", why)
    return kl_penalty(logp_BT, ref_BT, algo.kl_estimator).masked_fill(~batch.mask_BT, 0.0)


def _require_inputs(batch: TrainBatch, algo: AlgoConfig) -> None:
    """Raise `ValueError` if the batch lacks what the estimator's traits say that it needs."""
    why = f"algo.advantage={algo.advantage}"
    if algo.estimator.needs_critic:
        _require_field(batch, "value_BT", why, "a batch that no critic has seen")
    if algo.estimator.needs_greedy_baseline:
        _require_field(batch, "baseline_B", why, "a batch without greedy answers")


def _check_user_result(result: object, inputs: AdvantageInputs, algo: AlgoConfig) -> None:
    """Raise `ValueError` unless a user's function returned tensors of the right shapes."""
    why, traits = f"algo.advantage={algo.advantage}", algo.estimator
    got: object = type(result).__name__
    by_token = tuple(inputs.batch.mask_BT.shape)
    shapes: dict[tuple[int, ...], str] = {
        (len(inputs.rows.first_row_A),): "one advantage per trajectory"
    }
    if not traits.per_trajectory:
        shapes[by_token] = "one per token"
    if isinstance(result, AdvantageResult):
        got = _shape_or_type(result.advantage)
    if got not in shapes:
        expected = ", or ".join(f"{shape}, {what}" for shape, what in shapes.items())
        raise ValueError(
            f"{why}: returned {got}, expected an AdvantageResult with a tensor of shape {expected};"
            " probable cause: a tensor in place of an AdvantageResult, or another shape"
        )
    assert isinstance(result, AdvantageResult)
    if traits.needs_critic and _shape_or_type(result.return_BT) != by_token:
        raise ValueError(
            f"{why}: returned {_shape_or_type(result.return_BT)} as return_BT, expected a tensor "
            f"of shape {by_token}, the targets of the critic that it needs"
        )


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
        raise ValueError(
            f"algo.advantage={algo.advantage}: returned {num_bad} numbers that are not finite for "
            "trained tokens, expected none; probable cause: a division by the spread of equal "
            "rewards"
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
    grid_BT = _require_field(batch, "entropy_BT", f"algo.egpo.lam={settings.lam}")
    mask_AL = rows.concat_rows(batch.mask_BT, batch.length_B)
    cot_AL = mask_AL
    if settings.cot_blocks is not CotBlocks.response:
        if cot_marker_ids is None:
            raise ValueError(
                f"add_advantages: got no cot_marker_ids with "
                f"algo.egpo.cot_blocks={settings.cot_blocks}; expected the token ids of "
                "algo.egpo.cot_markers; probable cause: they were not tokenized"
            )
        token_AL = rows.concat_rows(batch.response_BT, batch.length_B)
        start, end = cot_marker_ids
        cot_AL = cot_mask(
            token_AL, mask_AL, start_id=start, end_id=end, blocks=str(settings.cot_blocks)
        )
    entropy_A = cot_entropy(rows.concat_rows(grid_BT, batch.length_B), cot_AL)
    egpo_advantage_A = egpo(advantage_A, entropy_A, lam=settings.lam, alpha=settings.alpha)
    trained_A = mask_AL.any(1)
    bounded_A = entropy_A > advantage_A.abs() / settings.alpha
    return egpo_advantage_A, {
        "egpo/cot_entropy": float(masked_mean(entropy_A, trained_A)),
        "egpo/no_cot_fraction": _masked_fraction(~cot_AL.any(1), trained_A),
        "egpo/bonus_mean": float(masked_mean(egpo_advantage_A - advantage_A, trained_A)),
        "egpo/clipfrac": _masked_fraction(bounded_A, trained_A),
    }


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


def _masked_fraction(condition: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(condition.float(), mask))


def _require_field(
    batch: TrainBatch,
    name: str,
    why: str,
    cause: str = "compute_log_probs was not called, or there is no reference",
) -> torch.Tensor:
    """Return an optional field of the batch; raise `ValueError` if it is None."""
    value: torch.Tensor | None = getattr(batch, name)
    if value is None:
        raise ValueError(f"{name}: got None, expected values with {why}; probable cause: {cause}")
    return value
