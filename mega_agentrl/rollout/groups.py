"""The groups of a step: rolled out, scored, kept or replaced as they finish.

Without a filter nobody here waits for scores that others work on: the batch is complete without
them (`Collected.pending`), and `train.rewards` fills them in while the step goes on.

Consumes prompts from a `PromptSource`, produces the trees a step trains on. Waits for groups,
whose engine and tools have deadlines of their own; unblocked by each group that finishes, by
`rollout.straggler_s` and by cancellation, after which nothing of it runs.

B groups make the batch (`data.prompts_per_step`), B + `rollout.oversample` are started. What
`filter` does not keep is replaced at once as soon as fewer than B can be had, up to
`group_step.MAX_ROUNDS` times B in all, and then it is an error that says what was seen. The
batch is the first B kept groups in the order of the prompts, and it is complete when everything
before its last group has finished. So without a limit on time the batch depends on seeds alone,
not on timing and not on `oversample`, which only saves waiting for replacements.

Where `rollout.straggler_s` is set, the unfinished groups get so long once `rollout.quorum` of
the batch is kept. What is unfinished then is a straggler; the batch is what there is by then,
which depends on timing and may be less than B.

Under `rollout.carry_over` stragglers, and finished or unfinished groups behind the batch, stand
first in the next step: a request in the middle of a turn is ended and continued with the new
weights, tokens keep the version they were sampled with, tools stay open. A group with a busy tool
cannot rest and is dropped. At most B + oversample groups are carried, as they count as started.

Prompts: each is given back to the source (`put_back`) or settled exactly once. Settled are those
trained on, filtered, and dropped stragglers; put back, so that they come first in the next step,
are those that the batch did not reach. Carried ones are neither yet: a checkpoint of the source
gives them again. A bug or a cancellation leaves the prompts of the step unsettled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.group import end_groups
from mega_agentrl.rollout.group_step import GroupStep

if TYPE_CHECKING:
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.rollout.group import Group
    from mega_agentrl.rollout.trajectory import RolloutContext
    from mega_agentrl.types.ports import PromptSource, Rubric


class GroupCollector:
    """Collects step after step; holds what is carried from one to the next.

    context: of every step, but for its `step`. num_groups: B.
    """

    def __init__(
        self, source: PromptSource, context: RolloutContext, rubric: Rubric, *, num_groups: int
    ) -> None:
        self._source = source
        self._context = context
        self._rubric = rubric
        self._num_groups = num_groups
        self._carried: list[Group] = []

    async def collect(self, step: int | str) -> Collected:
        """The groups of a step; step: see `collector.collect`.

        Raises `ValueError` for a prompt that is too long, and where
        `group_step.MAX_ROUNDS` replacements of the batch do not fill it.
        """
        collected = await self.collect_early(step)
        self.settle(collected)
        return collected

    def settle(self, collected: Collected) -> None:
        """The step of these groups is the next one to be trained on: their prompts are done with.

        Until then a checkpoint of the source gives them again.
        """
        self._source.settle(collected.used)

    async def collect_early(self, step: int | str, *, max_age: int = 0) -> Collected:
        """`collect` without `settle`; several steps may be under way, unless they carry over.

        max_age: of kept trees, see `RolloutContext`.
        """
        context = replace(self._context, step=step, max_age=max_age)
        work = GroupStep(self._source, context, self._rubric, self._num_groups, self._carried)
        self._carried = []
        try:
            await work.run()
            collected, self._carried = await work.take()
        except BaseException:
            await end_groups(work.groups)
            raise
        return collected

    async def close(self) -> None:
        """End what was carried and put its prompts back; safe to call twice."""
        carried, self._carried = self._carried, []
        bug = await end_groups(carried)
        self._source.put_back([group.prompt for group in carried])
        if bug is not None:
            raise bug
