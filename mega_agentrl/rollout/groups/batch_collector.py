"""Collection of one step's batch: starting, filtering, replacing and carrying over groups.

The rules are described in `groups.collector`. If `run` or `take_batch` raises, the caller must
cancel `groups`.
"""

from __future__ import annotations

import asyncio
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.rollout.collector import PromptKeyAllocator, check_prompt_lengths, is_lockstep
from mega_agentrl.rollout.groups.filter import FilterResult, group_metric_mean
from mega_agentrl.rollout.groups.group import (
    Group,
    cancel_groups,
    pause_groups,
    start_group,
    start_lockstep_groups,
)
from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.trajectory import RolloutContext
    from mega_agentrl.types.protocols import PromptSource, Rubric

MAX_REFILL_ROUNDS = 20
"""Maximum replacements of a step, in batches: if fewer than one group in twenty is accepted, the
data or the filter must change. DAPO and ARES have the same limit."""

QUORUM_EPS = 1e-9
"""Tolerance for rounding errors of `rollout.min_finished_fraction` times the batch size."""


class BatchCollector:
    """Collects the batch of one step; call `run`, then `take_batch`, once each.

    `groups` are in the order of their prompts, carried ones first.

    Args:
        source: Gives the prompts.
        context: The context of the step.
        rubric: Scores the trajectories.
        num_groups: Number of groups in a batch (B).
        carried: Groups carried over from the step before.
    """

    def __init__(
        self,
        source: PromptSource,
        context: RolloutContext,
        rubric: Rubric,
        num_groups: int,
        carried: Sequence[Group],
    ) -> None:
        self.groups = list(carried)
        self._source = source
        self._context = context
        self._config = context.config
        self._rubric = rubric
        self._num_groups = num_groups
        self._num_carried_in = len(carried)
        self._num_replaced = 0
        self._prompt_keys = PromptKeyAllocator()
        self._group_done = asyncio.Event()

    async def run(self) -> None:
        """Run until the batch is complete or the straggler timeout expires."""
        if self._is_complete():
            return
        for group in self.groups:
            group.task.add_done_callback(self._on_group_done)
            group.resume()
        num_first = self._num_groups + self._config.num_oversampled_prompts - len(self.groups)
        self._start_groups(max(0, num_first))
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

    async def take_batch(self) -> tuple[RolloutBatch, list[Group]]:
        """Return the batch and the groups to carry over.

        Prompts beyond the batch that are not carried over are returned to the source.
        """
        accepted = [group for group in self.groups if group.is_accepted][: self._num_groups]
        is_full = len(accepted) == self._num_groups
        end = self.groups.index(accepted[-1]) + 1 if is_full else len(self.groups)
        within, beyond = self.groups[:end], self.groups[end:]
        finished = [group for group in within if group.filter_result is not None]
        stragglers = [group for group in within if group.filter_result is None]
        filter_results = [
            group.filter_result for group in finished if group.filter_result is not None
        ]
        carried = await self._carry_over([*stragglers, *beyond])
        dropped = [group for group in stragglers if group not in carried]
        self._source.nack([group.prompt for group in beyond if group not in carried])
        for group in carried:
            group.num_steps_carried += 1
        num_started = len(self.groups) - self._num_carried_in
        batch = RolloutBatch(
            trees=[group.tree for group in accepted],
            finished_trees=[group.tree for group in finished],
            filter_results=filter_results,
            version=self._context.generator.version,
            pending_scores=[one for group in finished for one in group.pending_scores],
            consumed_prompts=[group.prompt for group in (*finished, *dropped)],
            group_counts={
                "num_groups_started": num_started,
                "num_groups_carried_in": self._num_carried_in,
                "num_groups_restored": sum(group.is_restored for group in self.groups),
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
        bug = await cancel_groups(group for group in leftover if group not in carried)
        if bug is not None:
            raise bug
        return carried

    def _is_complete(self) -> bool:
        """Return whether B groups are accepted and all groups before the last one have finished."""
        num_accepted = 0
        for group in self.groups:
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
        if is_lockstep(self._context):
            new = start_lockstep_groups(self._context, prompts, keys, self._rubric)
        else:
            new = [
                start_group(self._context, prompt, key, self._rubric)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
        for group in new:
            group.task.add_done_callback(self._on_group_done)
        self.groups += new

    def _on_group_done(self, task: asyncio.Task[object]) -> None:
        del task
        self._group_done.set()

    def _filter_finished_groups(self) -> None:
        for group in self.groups:
            if group.filter_result is None and group.task.done():
                group.apply_filter(self._context)

    def _refill(self) -> None:
        """Start new groups until B accepted groups are possible again."""
        num_possible = sum(
            group.filter_result is None or group.is_accepted for group in self.groups
        )
        num_missing = max(0, self._num_groups - num_possible)
        if self._num_replaced + num_missing > MAX_REFILL_ROUNDS * self._num_groups:
            raise ValueError(self._refill_limit_message())
        self._num_replaced += num_missing
        self._start_groups(num_missing)

    def _start_straggler_timeout(self, clock: asyncio.Timeout) -> None:
        """Start the straggler timeout once enough of the batch is accepted."""
        if not self._config.straggler_timeout_s or clock.when() is not None:
            return
        quorum = max(1, ceil(self._config.min_finished_fraction * self._num_groups - QUORUM_EPS))
        if sum(group.is_accepted for group in self.groups) >= quorum:
            now_s = asyncio.get_running_loop().time()
            clock.reschedule(now_s + self._config.straggler_timeout_s)

    def _refill_limit_message(self) -> str:
        config = self._config
        finished = [group for group in self.groups if group.filter_result is not None]
        num = {
            result: sum(group.filter_result is result for group in finished)
            for result in FilterResult
        }
        means = [group_metric_mean(group.tree, config.filter_metric) for group in finished]
        known = sorted(mean for mean in means if mean is not None)
        spread = (
            f"means from {known[0]:.3g} to {known[-1]:.3g}, median {known[len(known) // 2]:.3g}"
            if known
            else "no group with two trajectories that did not fail"
        )
        cause = max(
            (one for one in FilterResult if one is not FilterResult.accepted), key=num.__getitem__
        )
        causes = {
            FilterResult.below_range: (
                "the prompts are too hard for the policy, or the reward never fires"
            ),
            FilterResult.above_range: "the prompts have become too easy for the policy",
            FilterResult.too_few_valid: "engine or tools fail; see their logs",
        }
        low, high = config.filter_range
        return (
            f"rollout.filter_metric={config.filter_metric}: got {num[FilterResult.accepted]} "
            f"groups to train on, expected data.prompts_per_step={self._num_groups} after "
            f"{MAX_REFILL_ROUNDS} rounds of replacements; of "
            f"{len(finished)} finished groups {num[FilterResult.below_range]} have a mean at or "
            f"below rollout.filter_range[0]={low:g}, {num[FilterResult.above_range]} at or above "
            f"rollout.filter_range[1]={high:g}, {num[FilterResult.too_few_valid]} failed "
            f"({spread}); probable cause: {causes[cause]}"
        )
