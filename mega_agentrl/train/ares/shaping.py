"""ARES in a training step: entropy rewards and KL weights by difficulty, then the update.

    stats = collect_entropy_stats(batch.finished_trees, trigger_ids)     before any filter
    step = start_ares_step(stats, controllers.ares, rules, filtered=...)
    batch = add_entropy_rewards(batch, trees, step)                      before the advantages
    weights = token_kl_weights(batch, trees, step)                       for the update
    kl_B = mean_ref_kl(batch, trees, step, kind)
    controllers = update_controllers(controllers, step, kl_B)            after it

`paper`: rewards and KL weights of a step come from the state before it; a prompt without a known
difficulty gets the difficulty of its own group. Without a threshold the step's own is used, so that
the first batch has counts from which the targets start; that batch gets no entropy rewards. The KL
is known only for the trajectories that are trained on, and only these change the lambdas.

`released` reproduces the published code (github.com/shawn0728/ARES): a batch is shaped with its own
difficulties, targets and alphas, and windows are counted with the threshold from before the batch;
without one every window counts. If groups are filtered, that code computes rewards before it knows
any of these: every prompt is easy, with target 0 and alpha 0.5. KL is weighted per trajectory. This
module differs from that code in three points: entropies are exact, where the code uses the 10 most
probable tokens, with their tail for counting and without it for the threshold; groups are filtered
by rewards that are not shaped yet; and there is one KL controller for all ranks, which runs once
per step, not per micro-batch.

A trajectory may have several rows in the batch (`TrainBatch.trajectory_B`). B counts rows of the
batch or, in `AresStep`, the trajectories of the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo import ares, mastery
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.masking import masked_sum
from mega_agentrl.config.enums import AresMode
from mega_agentrl.errors import InputError
from mega_agentrl.train.trajectory_rows import row_trajectories

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.algo.ares import AresHyperparams, AresState, AresStats
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.ares.entropy_stats import EntropyStats
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

INITIAL_RELEASED_THRESHOLD = -1.0
"""Threshold of the published code before it has measured one, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AresStep:
    """Values of ARES for one step; tensors over the B trajectories of `entropy_stats`."""

    entropy_stats: EntropyStats
    rules: AresHyperparams
    state_before: AresState
    """State before the step, with a threshold."""
    ares_stats: AresStats
    """Statistics for the update, still without the KL."""
    threshold: float | None
    """Threshold by which windows were counted, nats; None if nothing was sampled."""
    difficulty_B: torch.Tensor
    """[B] int64 difficulty that each trajectory is treated as."""
    entropy_reward_B: torch.Tensor
    """[B] float64 addition to the reward."""
    kl_coef_B: torch.Tensor
    """[B] float64 weight of the KL."""


def build_rules(algo: AlgoConfig, kl_coef: float) -> AresHyperparams:
    """Return the hyperparameters of `algo.ares`; `kl_coef` is the current KL weight."""
    settings = algo.ares
    margin_easy, margin_medium, margin_hard = settings.margin_fraction
    budget_easy, budget_medium, budget_hard = settings.kl_budget
    return ares.AresHyperparams(
        name="released" if settings.mode is AresMode.released else "paper",
        window=settings.window_tokens,
        margin_fraction=(margin_easy, margin_medium, margin_hard),
        kl_window_factor=settings.kl_window_factor,
        kl_coef=kl_coef,
        alpha_rate=settings.alpha_rate,
        alpha_max=settings.alpha_max,
        threshold_decay=settings.threshold_decay,
        target_rate=settings.target_rate,
        lambda_rate=settings.kl_budget_rate,
        kl_budget=(budget_easy, budget_medium, budget_hard),
        min_trajectories=settings.min_trajectories,
    )


def start_ares_step(
    entropy_stats: EntropyStats, state: AresState, rules: AresHyperparams, *, filtered: bool
) -> AresStep:
    """Compute entropy rewards and KL weights of the trajectories.

    Args:
        entropy_stats: Statistics of the step's trajectories.
        state: State before the step.
        rules: The hyperparameters.
        filtered: Whether groups are filtered (`rollout.filter_metric`); only read under `released`.
    """
    if rules.name == "released":
        return _start_released_step(entropy_stats, state, rules, filtered=filtered)
    if state.threshold is None:
        state = ares.update_threshold(
            state, entropy_stats.entropy_p95_B, decay=rules.threshold_decay
        )
    stats = to_ares_stats(entropy_stats, state.threshold)
    group_difficulty_B = ares.difficulty(stats.correct_B, stats.group_B())
    difficulty_B = state.difficulty_codes(stats.prompt_ids, group_difficulty_B)
    return AresStep(
        entropy_stats=entropy_stats,
        rules=rules,
        state_before=state,
        ares_stats=stats,
        threshold=state.threshold,
        difficulty_B=difficulty_B,
        entropy_reward_B=_entropy_rewards(state, stats, difficulty_B, rules),
        kl_coef_B=state.betas_for(difficulty_B, rules),
    )


def _start_released_step(
    entropy_stats: EntropyStats, state: AresState, rules: AresHyperparams, *, filtered: bool
) -> AresStep:
    threshold = INITIAL_RELEASED_THRESHOLD if state.threshold is None else state.threshold
    stats = to_ares_stats(entropy_stats, threshold)
    updated_state = ares.update(state, stats, rules)
    difficulty_B = updated_state.difficulty_codes(stats.prompt_ids)
    if filtered:
        initial_state = ares.AresState(targets=(0.0, 0.0, 0.0))
        easy_B = torch.full_like(difficulty_B, ares.EASY)
        entropy_reward_B = _entropy_rewards(initial_state, stats, easy_B, rules)
    else:
        entropy_reward_B = _entropy_rewards(updated_state, stats, difficulty_B, rules)
    return AresStep(
        entropy_stats=entropy_stats,
        rules=rules,
        state_before=state,
        ares_stats=stats,
        threshold=threshold,
        difficulty_B=difficulty_B,
        entropy_reward_B=entropy_reward_B,
        kl_coef_B=state.betas_for(difficulty_B, rules),
    )


def to_ares_stats(entropy_stats: EntropyStats, threshold: float | None) -> AresStats:
    """Return the statistics for the update, with windows counted by `threshold`, without KL."""
    return ares.AresStats(
        prompt_ids=entropy_stats.prompt_ids,
        correct_B=entropy_stats.is_correct_B,
        hwe_B=entropy_stats.hwe_count_B(threshold),
        p95_B=entropy_stats.entropy_p95_B,
    )


def _entropy_rewards(
    state: AresState, stats: AresStats, difficulty_B: torch.Tensor, rules: AresHyperparams
) -> torch.Tensor:
    return ares.entropy_reward(
        stats.correct_B,
        stats.hwe_B,
        state.targets_for(difficulty_B),
        state.alphas_for(difficulty_B),
        difficulty_B,
        rule="released" if rules.name == "released" else "centred",
        margin_fraction=rules.margin_fraction,
    )


def add_entropy_rewards(
    batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep
) -> TrainBatch:
    """Add the entropy rewards to `reward_B`; failed rows keep theirs."""
    entropy_reward_B = torch.zeros_like(batch.reward_B)
    for row, index, _ in _match_rows(batch, trees, step.entropy_stats):
        entropy_reward_B[row] = step.entropy_reward_B[index]
    return batch.with_fields(reward_B=batch.reward_B + entropy_reward_B)


def token_kl_weights(
    batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep
) -> torch.Tensor | None:
    """Return the KL weight of each token, [B, T] float32; None without a reference.

    Masked rows, which have no statistics, get the weight of an unknown prompt.
    """
    if batch.ref_logp_BT is None:
        return None
    beta_B = torch.full((batch.num_rows,), step.rules.kl_coef)
    window_BT = torch.full(batch.mask_BT.shape, torch.nan)
    for row, index, start in _match_rows(batch, trees, step.entropy_stats):
        beta_B[row] = step.kl_coef_B[index]
        size = int(batch.length_B[row])
        window_BT[row, :size] = step.entropy_stats.window_entropies[index][start : start + size]
    if step.rules.name == "released" or step.threshold is None:
        return beta_B.unsqueeze(1).expand_as(window_BT).contiguous()
    hwe_BT = ares.hwe_mask(window_BT, threshold=step.threshold, window=step.rules.window)
    return ares.token_kl_weight(hwe_BT, beta_B, rho=step.rules.kl_window_factor)


def mean_ref_kl(
    batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep, kind: str
) -> torch.Tensor | None:
    """Return each trajectory's mean KL to the reference over sampled tokens, [B] float64 nats.

    NaN for trajectories that are not in the batch; None without a reference. `kind` is that of
    `algo.kl.kl_penalty`.
    """
    if batch.ref_logp_BT is None:
        return None
    assert batch.old_logp_BT is not None, "the log-prob pass comes before"
    kl_BT = kl_penalty(batch.old_logp_BT, batch.ref_logp_BT, kind)
    sum_B, num_B = masked_sum(kl_BT, batch.mask_BT, 1).double(), batch.mask_BT.sum(1).double()
    total_B = torch.zeros(len(step.entropy_stats.trajectory_ids), dtype=torch.float64)
    count_B = torch.zeros_like(total_B)
    for row, index, _ in _match_rows(batch, trees, step.entropy_stats):
        total_B[index] += sum_B[row]
        count_B[index] += num_B[row]
    return total_B / torch.where(count_B > 0, count_B, torch.nan)


def update_controllers(
    controllers: Controllers, step: AresStep, kl_B: torch.Tensor | None
) -> Controllers:
    """Return the controllers after the step; `kl_B` is the result of `mean_ref_kl`."""
    if not step.entropy_stats.trajectory_ids:
        return controllers
    stats, entropy_stats = replace(step.ares_stats, kl_B=kl_B), step.entropy_stats
    return replace(
        controllers,
        ares=ares.update(step.state_before, stats, step.rules),
        mastery=mastery.update(
            controllers.mastery,
            entropy_stats.prompt_ids,
            entropy_stats.is_correct_B,
            entropy_stats.mean_entropy_B,
        ),
    )


def ares_metrics(
    controllers: Controllers, step: AresStep, kl_B: torch.Tensor | None
) -> dict[str, float]:
    """Return metrics named ``ares/...``: the step's buckets, and the controllers after it.

    `ares/entropy_reward_mean` and `ares/entropy_reward_abs_mean` are means over trajectories,
    `ares/num_mastered` counts the prompts that are mastered now.
    """
    stats = replace(step.ares_stats, kl_B=kl_B)
    num_trajectories = max(1, len(step.entropy_stats.trajectory_ids))
    return {
        **ares.metrics(controllers.ares, stats, step.difficulty_B, step.rules),
        "ares/entropy_reward_mean": float(step.entropy_reward_B.sum()) / num_trajectories,
        "ares/entropy_reward_abs_mean": float(step.entropy_reward_B.abs().sum()) / num_trajectories,
        "ares/num_mastered": float(len(controllers.mastery.mastered_prompts())),
    }


def _match_rows(
    batch: TrainBatch, trees: Sequence[RolloutTree], entropy_stats: EntropyStats
) -> Iterator[tuple[int, int, int]]:
    """Yield row, index of its trajectory in the statistics, and the row's start in the trajectory.

    Rows of one trajectory follow each other in order, as `batch.packing` makes them. Trajectories
    without statistics are left out.
    """
    ids = [trajectory.trajectory_id for tree in trees for trajectory in tree.trajectories]
    owners = row_trajectories(batch)
    is_other_size = batch.trajectory_B is None and len(ids) != batch.num_rows
    if is_other_size or max(owners, default=-1) >= len(ids):
        got = f"{len(ids)} trajectories for a batch of {batch.num_rows} rows"
        cause = "rows were added or removed after packing"
        raise InputError("trees", got, "those that the batch was packed from", cause)
    index_by_id = {name: index for index, name in enumerate(entropy_stats.trajectory_ids)}
    starts = [0] * len(ids)
    for row, (owner, size) in enumerate(zip(owners, batch.length_B.tolist(), strict=True)):
        if ids[owner] in index_by_id:
            yield row, index_by_id[ids[owner]], starts[owner]
        starts[owner] += size
