"""Collection of the groups of a training step, from prompts to the trees to train on.

**Batch.** A batch has B = `data.prompts_per_step` groups; B + `rollout.num_oversampled_prompts` are
started. Groups are scored and filtered as they finish. As soon as fewer than B accepted groups are
possible, rejected groups are replaced, up to `MAX_REFILL_ROUNDS` times B in total; beyond that a
`ValueError` reports what was filtered. The batch consists of the first B accepted groups in prompt
order, and is complete when all groups before its last one have finished. Without a timeout it
therefore depends on seeds alone, not on timing and not on oversampling, which only shortens the
wait for replacements.

**Scores.** With a filter a group finishes when its scores are known. Without one the batch does not
wait for scores (`RolloutBatch.pending_scores`); `train.rewards` fills them in later.

**Stragglers.** If `rollout.straggler_timeout_s` is set, unfinished groups get that time once
`rollout.min_finished_fraction` of the batch is accepted. Groups that are still unfinished then are
stragglers, and the batch consists of the groups accepted so far: it depends on timing and may be
smaller than B.

**Partial rollouts.** With `rollout.partial_rollout`, stragglers and groups beyond the batch are
carried over and come first in the next step. A running request is interrupted and continued with
the new weights; tokens keep the version they were sampled with, and tools stay open. A group with a
busy tool cannot be paused and is dropped. At most B + `rollout.num_oversampled_prompts` groups are
carried over, since they count as started.

**Prompts.** Each prompt is acknowledged (`PromptSource.ack`) or returned (`nack`) exactly once.
Prompts that were trained on, filtered, or dropped as stragglers are acknowledged. Prompts beyond
the batch are returned and come first in the next step. Prompts that are carried over stay in
flight, so that a restored checkpoint of the source returns them again, as do all prompts of a step
that ends with an exception.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.collector import PromptKeyAllocator, check_prompt_lengths
from mega_agentrl.rollout.groups.filter import FilterResult, group_metric_mean
from mega_agentrl.rollout.groups.group import (
    Group,
    cancel_groups,
    pause_groups,
    start_group,
    start_lockstep_groups,
)
from mega_agentrl.rollout.groups.scoring import valid_scores
from mega_agentrl.rollout.metrics.rollout import mean_or_zero

if TYPE_CHECKING:
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.groups.scoring import PendingScore
    from mega_agentrl.types.protocols import PromptSource, Rubric
    from mega_agentrl.types.records import Prompt, RolloutTree

MAX_REFILL_ROUNDS = 20
"""Maximum replacements of a step, in batches: if fewer than one group in twenty is accepted, the
data or the filter must change. DAPO and ARES have the same limit."""

QUORUM_EPS = 1e-9
"""Tolerance for rounding errors of `rollout.min_finished_fraction` times the batch size."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutBatch:
    """The groups of a step, in the order of their prompts.

    Scores may still be missing; metrics about them are correct once `pending_scores` are resolved.
    """

    trees: Sequence[RolloutTree]
    """Trees to train on."""
    finished_trees: Sequence[RolloutTree]
    """`trees` and the filtered ones; the basis of statistics of the policy."""
    filter_results: Sequence[FilterResult]
    """Filter result of each finished tree."""
    version: int
    """Weight version that the engine served when the batch was complete."""
    group_counts: Mapping[str, int]
    """Numbers of groups by metric name, without the prefix ``rollout/``."""
    pending_scores: Sequence[PendingScore] = ()
    """Scores of finished trees that are still being computed."""
    consumed_prompts: Sequence[Prompt] = ()
    """Prompts of the finished trees and of dropped stragglers."""

    def __post_init__(self) -> None:
        if len(self.finished_trees) != len(self.filter_results):
            expected = f"one for each of the {len(self.finished_trees)} finished trees"
            raise InputError("number of filter results", len(self.filter_results), expected)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the groups, named ``rollout/...``.

        `success_unfiltered` and `reward_unfiltered` are means over all finished trajectories,
        before the filter. `stale_tokens_fraction` is the share of sampled tokens to train on that
        are older than `version`; `staleness_mean` and `staleness_max` are their lags in versions.
        """
        counts = Counter(self.filter_results)
        scores = valid_scores(
            trajectory for tree in self.finished_trees for trajectory in tree.trajectories
        )
        values: dict[str, float] = {
            **self.group_counts,
            "num_groups_kept": len(self.trees),
            "num_groups_filtered_low": counts[FilterResult.below_range],
            "num_groups_filtered_high": counts[FilterResult.above_range],
            "num_groups_failed": counts[FilterResult.too_few_valid],
            "success_unfiltered": mean_or_zero(score.correct for score in scores),
            "reward_unfiltered": mean_or_zero(score.value for score in scores),
            **self._staleness_metrics(),
        }
        return {f"rollout/{name}": float(value) for name, value in values.items()}

    def _staleness_metrics(self) -> dict[str, float]:
        lags = [
            self.version - version
            for tree in self.trees
            for trajectory in tree.trajectories
            for version, sampled in zip(trajectory.versions, trajectory.loss_mask, strict=True)
            if sampled
        ]
        return {
            "stale_tokens_fraction": mean_or_zero(lag > 0 for lag in lags),
            "staleness_mean": mean_or_zero(lags),
            "staleness_max": max(lags, default=0),
        }


class RolloutCollector:
    """Collects the groups of each step, and holds those that are carried over to the next.

    Every step uses `context` with its own `step`; a batch has `num_groups` (B) groups.
    """

    def __init__(
        self, source: PromptSource, context: RolloutContext, rubric: Rubric, *, num_groups: int
    ) -> None:
        self._source = source
        self._context = context
        self._rubric = rubric
        self._num_groups = num_groups
        self._carried: list[Group] = []

    async def collect(self, step: int | str) -> RolloutBatch:
        """Collect the batch of a step and acknowledge its prompts.

        Args:
            step: Name of the pass (see `RolloutContext.step`).

        Raises:
            ValueError: A prompt is too long, or the batch is not full after
                `MAX_REFILL_ROUNDS` rounds of replacements.
        """
        batch = await self.collect_unacked(step)
        self.ack(batch)
        return batch

    def ack(self, batch: RolloutBatch) -> None:
        """Acknowledge the prompts of a batch that is about to be trained on.

        Until then, a restored checkpoint of the source returns them again.
        """
        self._source.ack(batch.consumed_prompts)

    async def collect_unacked(self, step: int | str, *, max_version_lag: int = 0) -> RolloutBatch:
        """Collect the batch of a step without acknowledging its prompts.

        Several steps may be collected concurrently unless groups are carried over.

        Args:
            step: Name of the pass (see `RolloutContext.step`).
            max_version_lag: See `RolloutContext.max_version_lag`.
        """
        context = replace(self._context, step=step, max_version_lag=max_version_lag)
        carried, self._carried = self._carried, []
        batch, self._carried = await _BatchCollector(
            self._source, context, self._rubric, self._num_groups, carried
        ).collect()
        return batch

    async def close(self) -> None:
        """Cancel carried groups and return their prompts; safe to call twice."""
        carried, self._carried = self._carried, []
        error = await cancel_groups(carried)
        self._source.nack([group.prompt for group in carried])
        if error is not None:
            raise error


class _BatchCollector:
    """Collects the `num_groups` (B) groups of one step; call `collect` once.

    `carried` are the groups carried over from the step before.
    """

    def __init__(
        self,
        source: PromptSource,
        context: RolloutContext,
        rubric: Rubric,
        num_groups: int,
        carried: Sequence[Group],
    ) -> None:
        self._groups = list(carried)  # in the order of their prompts
        self._source = source
        self._context = context
        self._config = context.config
        self._rubric = rubric
        self._num_groups = num_groups
        self._num_carried_in = len(carried)
        self._num_replaced = 0
        self._prompt_keys = PromptKeyAllocator()
        self._group_done = asyncio.Event()

    async def collect(self) -> tuple[RolloutBatch, list[Group]]:
        """Return the batch and the groups to carry over; an exception cancels all groups."""
        try:
            await self._run()
            return await self._take_batch()
        except BaseException:
            await cancel_groups(self._groups)
            raise

    async def _run(self) -> None:
        """Run until the batch is complete or the straggler timeout expires."""
        if self._is_complete():
            return
        for group in self._groups:
            group.task.add_done_callback(self._on_group_done)
            group.resume()
        num_to_start = self._num_groups + self._config.num_oversampled_prompts - len(self._groups)
        self._start_groups(max(0, num_to_start))
        clock = asyncio.timeout(None)
        try:
            async with clock:
                while not self._is_complete():
                    self._start_straggler_timeout(clock)
                    await self._group_done.wait()
                    self._group_done.clear()
                    self._filter_finished_groups()
                    self._refill()
        except TimeoutError:
            if not clock.expired():
                raise
            self._filter_finished_groups()

    async def _take_batch(self) -> tuple[RolloutBatch, list[Group]]:
        """Return the batch and the groups to carry over.

        Prompts beyond the batch that are not carried over are returned to the source.
        """
        accepted = [group for group in self._groups if group.is_accepted][: self._num_groups]
        is_full = len(accepted) == self._num_groups
        end = self._groups.index(accepted[-1]) + 1 if is_full else len(self._groups)
        within, beyond = self._groups[:end], self._groups[end:]
        finished = [group for group in within if group.filter_result is not None]
        stragglers = [group for group in within if group.filter_result is None]
        carried = await self._carry_over([*stragglers, *beyond])
        dropped = [group for group in stragglers if group not in carried]
        self._source.nack([group.prompt for group in beyond if group not in carried])
        for group in carried:
            group.num_steps_carried += 1
        num_started = len(self._groups) - self._num_carried_in
        batch = RolloutBatch(
            trees=[group.tree for group in accepted],
            finished_trees=[group.tree for group in finished],
            filter_results=[
                group.filter_result for group in finished if group.filter_result is not None
            ],
            version=self._context.generator.version,
            pending_scores=[score for group in finished for score in group.pending_scores],
            consumed_prompts=[group.prompt for group in (*finished, *dropped)],
            group_counts={
                "num_groups_started": num_started,
                "num_groups_carried_in": self._num_carried_in,
                "num_groups_restored": sum(group.is_restored for group in self._groups),
                "num_groups_beyond_batch": len(beyond),
                "num_refill_rounds": ceil(self._num_replaced / self._num_groups),
                "num_stragglers": len(stragglers),
                "num_stragglers_dropped": len(dropped),
                "num_groups_carried_over": len(carried),
                "carried_steps_max": max(
                    (group.num_steps_carried for group in accepted), default=0
                ),
            },
        )
        return batch, carried

    async def _carry_over(self, leftover: list[Group]) -> list[Group]:
        """Pause and return the groups that the next step continues; cancel the others."""
        carried: list[Group] = []
        if self._config.partial_rollout:
            await pause_groups(group for group in leftover if group.filter_result is None)
            self._filter_finished_groups()
            carried = [group for group in leftover if group.is_accepted or group.is_paused]
        error = await cancel_groups(group for group in leftover if group not in carried)
        if error is not None:
            raise error
        return carried

    def _is_complete(self) -> bool:
        """Return whether B groups are accepted and all groups before the last one have finished."""
        num_accepted = 0
        for group in self._groups:
            if group.filter_result is None:
                return False
            num_accepted += group.is_accepted
            if num_accepted == self._num_groups:
                return True
        return False

    def _start_groups(self, num_prompts: int) -> None:
        if not num_prompts:
            return
        prompts = self._source.next_prompts(num_prompts)
        check_prompt_lengths(prompts, self._context.max_model_len)
        keys = [self._prompt_keys.allocate(prompt) for prompt in prompts]
        if self._context.is_lockstep:
            new = start_lockstep_groups(self._context, prompts, keys, self._rubric)
        else:
            new = [
                start_group(self._context, prompt, key, self._rubric)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
        for group in new:
            group.task.add_done_callback(self._on_group_done)
        self._groups += new

    def _on_group_done(self, task: asyncio.Task[object]) -> None:
        del task
        self._group_done.set()

    def _filter_finished_groups(self) -> None:
        for group in self._groups:
            if group.filter_result is None and group.task.done():
                group.apply_filter(self._context)

    def _refill(self) -> None:
        """Start new groups until B accepted groups are possible again."""
        num_possible = sum(
            group.filter_result is None or group.is_accepted for group in self._groups
        )
        num_missing = max(0, self._num_groups - num_possible)
        if self._num_replaced + num_missing > MAX_REFILL_ROUNDS * self._num_groups:
            raise self._refill_limit_error()
        self._num_replaced += num_missing
        self._start_groups(num_missing)

    def _start_straggler_timeout(self, clock: asyncio.Timeout) -> None:
        """Start the straggler timeout once enough of the batch is accepted."""
        if not self._config.straggler_timeout_s or clock.when() is not None:
            return
        quorum = max(1, ceil(self._config.min_finished_fraction * self._num_groups - QUORUM_EPS))
        if sum(group.is_accepted for group in self._groups) >= quorum:
            now_s = asyncio.get_running_loop().time()
            clock.reschedule(now_s + self._config.straggler_timeout_s)

    def _refill_limit_error(self) -> ConfigError:
        config = self._config
        finished = [group for group in self._groups if group.filter_result is not None]
        counts = Counter(group.filter_result for group in finished)
        means = [group_metric_mean(group.tree, config.filter_metric) for group in finished]
        known = sorted(mean for mean in means if mean is not None)
        spread = (
            f"means from {known[0]:.3g} to {known[-1]:.3g}, median {known[len(known) // 2]:.3g}"
            if known
            else "no group with two trajectories that did not fail"
        )
        causes = {
            FilterResult.below_range: "the prompts are too hard, or the reward is always 0",
            FilterResult.above_range: "the prompts have become too easy for the policy",
            FilterResult.too_few_valid: "engine or tools fail; see their logs",
        }
        low, high = config.filter_range
        return ConfigError(
            "rollout.filter_metric",
            config.filter_metric,
            f"data.prompts_per_step={self._num_groups} groups to train on after "
            f"{MAX_REFILL_ROUNDS} rounds of replacements; got {counts[FilterResult.accepted]}: of "
            f"{len(finished)} finished groups {counts[FilterResult.below_range]} have a mean at "
            f"or below rollout.filter_range[0]={low:g}, {counts[FilterResult.above_range]} at or "
            f"above rollout.filter_range[1]={high:g}, {counts[FilterResult.too_few_valid]} failed "
            f"({spread})",
            causes[max(causes, key=counts.__getitem__)],
        )
