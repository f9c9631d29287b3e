"""ARES in a training step: rewards and KL weights by the difficulty of a prompt, then the update.

    seen = observe(collected.seen, trigger_ids)                before any filter
    step = begin_step(seen, controllers.ares, rules, filtered=...)
    batch = shape_rewards(batch, collected.trees, step)        before the advantages
    weights = kl_weights(batch, collected.trees, step)         for the update
    kl_B = measured_kl(batch, collected.trees, step, kind)
    controllers = ares_update(controllers, step, kl_B)         after it

`paper`: the step shapes and weighs by the state from before it, prompts never seen by the
difficulty their own group shows now. Where there is no threshold yet the step's own is taken, so
that the first batch has counts to start the targets with; it shapes nothing. KL is known for the
trajectories that are trained on only, and their buckets' lambdas follow them alone.

`released` repeats the published code (github.com/shawn0728/ARES): difficulty, targets and alphas
of the very batch shape it, and windows are counted by the threshold from before it, all of them
while there is none. With groups filtered its rewards are made before any of that exists: every
prompt is easy, with target 0 and alpha .5. KL is weighed by trajectory. It departs from that
code in this: entropies are exact, where it has those of the 10 likeliest tokens, with their tail
for counting and without it for the threshold; the filter judges rewards that are not shaped
yet; and the KL controller, one for all ranks, is called once a step, not by micro-batch.

A trajectory may be several rows of the batch (`TrainBatch.owner_B`). B rows or trajectories as
the name says: those of the batch, and in `AresStep` those that were seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo import ares, mastery
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.masking import masked_sum
from mega_agentrl.config.choices import AresMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.algo.ares import AresRules, AresState, AresStats
    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.seen import Seen
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

EVERY_TRIGGER = -1.0
"""Threshold of the published code before it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AresStep:
    """What a step of ARES works with; tensors over the B trajectories that were seen.

    before: the state from before the step, with a threshold. stats: without the KL. threshold:
    that windows were counted by, nats; None where nothing was sampled. code_B: [B] int64
    difficulty each is treated as. earned_B: [B] float64 shaping of its reward. beta_B: [B]
    float64 weight of its KL.
    """

    seen: Seen
    rules: AresRules
    before: AresState
    stats: AresStats
    threshold: float | None
    code_B: torch.Tensor
    earned_B: torch.Tensor
    beta_B: torch.Tensor


def rules_of(algo: AlgoConfig, kl_coef: float) -> AresRules:
    """The rules of `algo.ares.mode`; kl_coef: the weight of the KL term now."""
    rules = ares.RELEASED if algo.ares.mode is AresMode.released else ares.PAPER
    return replace(rules, kl_coef=kl_coef)


def begin_step(seen: Seen, state: AresState, rules: AresRules, *, filtered: bool) -> AresStep:
    """What the trajectories seen earn, and how strongly KL holds them.

    filtered: groups are filtered (`rollout.filter_key`); only the released rules ask.
    """
    if rules.name == "released":
        return _begin_released(seen, state, rules, filtered=filtered)
    if state.threshold is None:
        state = ares.update_threshold(state, seen.p95_B, decay=rules.threshold_decay)
    stats = stats_of(seen, state.threshold)
    now_B = ares.difficulty(stats.correct_B, stats.group_B())
    code_B = state.codes(stats.prompt_ids, now_B)
    return AresStep(
        seen=seen,
        rules=rules,
        before=state,
        stats=stats,
        threshold=state.threshold,
        code_B=code_B,
        earned_B=_earned(state, stats, code_B, "centred"),
        beta_B=state.beta_of(code_B, rules),
    )


def _begin_released(seen: Seen, state: AresState, rules: AresRules, *, filtered: bool) -> AresStep:
    threshold = EVERY_TRIGGER if state.threshold is None else state.threshold
    stats = stats_of(seen, threshold)
    now = ares.update(state, stats, rules)
    code_B = now.codes(stats.prompt_ids)
    if filtered:
        start = ares.AresState(targets=(0.0, 0.0, 0.0))
        earned_B = _earned(start, stats, torch.full_like(code_B, ares.EASY), "released")
    else:
        earned_B = _earned(now, stats, code_B, "released")
    return AresStep(
        seen=seen,
        rules=rules,
        before=state,
        stats=stats,
        threshold=threshold,
        code_B=code_B,
        earned_B=earned_B,
        beta_B=state.beta_of(code_B, rules),
    )


def stats_of(seen: Seen, threshold: float | None) -> AresStats:
    """The statistics of what was seen, with windows counted by a threshold; without KL."""
    return ares.AresStats(
        prompt_ids=seen.prompt_ids,
        correct_B=seen.correct_B,
        hwe_B=seen.hwe_B(threshold),
        p95_B=seen.p95_B,
    )


def _earned(state: AresState, stats: AresStats, code_B: torch.Tensor, rule: str) -> torch.Tensor:
    return ares.entropy_reward(
        stats.correct_B,
        stats.hwe_B,
        state.target_of(code_B),
        state.alpha_of(code_B),
        code_B,
        rule=rule,
    )


def shape_rewards(batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep) -> TrainBatch:
    """The batch of `trees` with the shaping added to `reward_B`; failed rows stay as they are."""
    earned_B = torch.zeros_like(batch.reward_B)
    for row, index, _ in _rows(batch, trees, step.seen):
        earned_B[row] = step.earned_B[index]
    return batch.with_fields(reward_B=batch.reward_B + earned_B)


def kl_weights(
    batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep
) -> torch.Tensor | None:
    """[B, T] float32 weight of each token's KL; None where there is no reference.

    Rows that were not seen, which are masked, get the weight of a prompt never seen.
    """
    if batch.ref_logp_BT is None:
        return None
    beta_B = torch.full((batch.num_rows,), step.rules.kl_coef)
    window_BT = torch.full(batch.mask_BT.shape, torch.nan)
    for row, index, start in _rows(batch, trees, step.seen):
        beta_B[row] = step.beta_B[index]
        size = int(batch.length_B[row])
        window_BT[row, :size] = step.seen.windows[index][start : start + size]
    if step.rules.name == "released" or step.threshold is None:
        return beta_B.unsqueeze(1).expand_as(window_BT).contiguous()
    return ares.token_kl_weight(ares.hwe_mask(window_BT, threshold=step.threshold), beta_B)


def measured_kl(
    batch: TrainBatch, trees: Sequence[RolloutTree], step: AresStep, kind: str
) -> torch.Tensor | None:
    """[B] float64 mean KL to the reference of the sampled tokens of each trajectory seen, nats.

    NaN for those that are not in the batch; None where there is no reference. kind: of
    `kl.kl_penalty`.
    """
    if batch.ref_logp_BT is None:
        return None
    assert batch.old_logp_BT is not None, "the log-prob pass comes before"
    kl_BT = kl_penalty(batch.old_logp_BT, batch.ref_logp_BT, kind)
    sum_B, num_B = masked_sum(kl_BT, batch.mask_BT, 1).double(), batch.mask_BT.sum(1).double()
    total_B = torch.zeros(len(step.seen.ids), dtype=torch.float64)
    count_B = torch.zeros_like(total_B)
    for row, index, _ in _rows(batch, trees, step.seen):
        total_B[index] += sum_B[row]
        count_B[index] += num_B[row]
    return total_B / torch.where(count_B > 0, count_B, torch.nan)


def ares_update(controllers: Controllers, step: AresStep, kl_B: torch.Tensor | None) -> Controllers:
    """The controllers after the step. kl_B: of `measured_kl`."""
    if not step.seen.ids:
        return controllers
    stats, seen = replace(step.stats, kl_B=kl_B), step.seen
    return replace(
        controllers,
        ares=ares.update(step.before, stats, step.rules),
        mastery=mastery.update(
            controllers.mastery, seen.prompt_ids, seen.correct_B, seen.entropy_B
        ),
    )


def ares_metrics(
    controllers: Controllers, step: AresStep, kl_B: torch.Tensor | None
) -> dict[str, float]:
    """Named ``ares/...``: the buckets as the step treated them, the controllers after it.

    `shaping`: mean of what was added to the rewards, and of its absolute value. `mastered`:
    prompts that are so now.
    """
    stats = replace(step.stats, kl_B=kl_B)
    number = max(1, len(step.seen.ids))
    return {
        **ares.metrics(controllers.ares, stats, step.code_B, step.rules),
        "ares/shaping_mean": float(step.earned_B.sum()) / number,
        "ares/shaping_mean_abs": float(step.earned_B.abs().sum()) / number,
        "ares/mastered": float(len(controllers.mastery.mastered())),
    }


def _rows(
    batch: TrainBatch, trees: Sequence[RolloutTree], seen: Seen
) -> Iterator[tuple[int, int, int]]:
    """Row, number of its trajectory among those seen, and the token of it that the row starts at.

    Rows of one trajectory follow each other in order, as `batch.pack` makes them. Left out are
    trajectories that were not seen.
    """
    ids = [one.trajectory_id for tree in trees for one in tree.trajectories]
    owners = list(range(len(ids))) if batch.owner_B is None else batch.owner_B.tolist()
    if len(owners) != batch.num_rows or max(owners, default=-1) >= len(ids):
        raise ValueError(
            f"trees: got {len(ids)} trajectories for a batch of {batch.num_rows} rows, expected "
            "those that the batch was packed of; probable cause: rows were added or taken out "
            "in between"
        )
    number = {name: index for index, name in enumerate(seen.ids)}
    starts = [0] * len(ids)
    for row, (owner, size) in enumerate(zip(owners, batch.length_B.tolist(), strict=True)):
        if ids[owner] in number:
            yield row, number[ids[owner]], starts[owner]
        starts[owner] += size
