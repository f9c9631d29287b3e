"""Collection of the groups of a training step, from prompts to the trees to train on.

**Batch.** A batch has B = `data.prompts_per_step` groups; B + `rollout.num_oversampled_prompts` are
started. Groups are scored and filtered as they finish. As soon as fewer than B accepted groups are
possible, rejected groups are replaced, up to `batch_collector.MAX_REFILL_ROUNDS` times B in total;
then a `ValueError` reports what was filtered. The batch consists of the first B accepted groups in
prompt order, and is complete when all groups before its last one have finished. Without a timeout
it therefore depends on seeds alone, not on timing and not on oversampling, which only saves waiting
for replacements.

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
flight, so that a checkpoint of the source gives them again, as do all prompts of a step that ends
with an exception.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.groups.batch_collector import BatchCollector
from mega_agentrl.rollout.groups.group import cancel_groups

if TYPE_CHECKING:
    from mega_agentrl.rollout.groups.group import Group
    from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch
    from mega_agentrl.rollout.trajectory import RolloutContext
    from mega_agentrl.types.protocols import PromptSource, Rubric


class RolloutCollector:
    """Collects the groups of each step, and holds those that are carried over to the next.

    Args:
        source: Gives the prompts.
        context: The context of every step, apart from its `step`.
        rubric: Scores the trajectories.
        num_groups: Number of groups in a batch (B).
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
                `batch_collector.MAX_REFILL_ROUNDS` rounds of replacements.
        """
        batch = await self.collect_unacked(step)
        self.ack(batch)
        return batch

    def ack(self, batch: RolloutBatch) -> None:
        """Acknowledge the prompts of a batch, because it is the next one to be trained on.

        Until then a checkpoint of the source gives them again.
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
        batch_collector = BatchCollector(
            self._source, context, self._rubric, self._num_groups, self._carried
        )
        self._carried = []
        try:
            await batch_collector.run()
            batch, self._carried = await batch_collector.take_batch()
        except BaseException:
            await cancel_groups(batch_collector.groups)
            raise
        return batch

    async def close(self) -> None:
        """Cancel carried groups and return their prompts; safe to call twice."""
        carried, self._carried = self._carried, []
        bug = await cancel_groups(carried)
        self._source.nack([group.prompt for group in carried])
        if bug is not None:
            raise bug
