"""One step's groups: which are started, when the batch is complete, what becomes of the others.

The rules are told in `groups`. Consumes prompts and carried groups, produces `Collected`; `run`
waits for the groups, unblocked by each that finishes and by the stragglers' limit, `take` for
those that are held or ended. Whoever calls ends `groups` where one of the two raises.
"""

from __future__ import annotations

import asyncio
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.rollout.collected import Collected
from mega_agentrl.rollout.collector import PromptKeys, check_prompts, goes_in_rounds
from mega_agentrl.rollout.filter import Verdict, group_mean
from mega_agentrl.rollout.group import (
    Group,
    end_groups,
    hold_groups,
    start_group,
    start_rounds,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.trajectory import RolloutContext
    from mega_agentrl.types.ports import PromptSource, Rubric

MAX_ROUNDS = 20
"""Replacements of a step at most, in batches: with fewer than one group in twenty to learn from,
it is the data or the filter that must change (DAPO's and ARES's limit)."""

ROUNDING = 1e-9


class GroupStep:
    """`run`, then `take`, once each. groups: in the order of their prompts, carried ones first."""

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
        self._num_resumed = len(carried)
        self._num_replaced = 0
        self._keys = PromptKeys()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Until the batch is complete or the stragglers' time is over."""
        if self._is_complete():
            return
        for group in self.groups:
            group.task.add_done_callback(self._note)
            group.go_on()
        num_first = self._num_groups + self._config.oversample - len(self.groups)
        self._start(max(0, num_first))
        clock = asyncio.timeout(None)
        try:
            async with clock:
                while not self._is_complete():
                    self._set(clock)
                    await self._news.wait()
                    self._news.clear()
                    self._judge()
                    self._replace()
        except TimeoutError:
            if not clock.expired():
                raise
            self._judge()

    async def take(self) -> tuple[Collected, list[Group]]:
        """The batch, and what is carried over; puts back the prompts that it did not reach."""
        kept = [group for group in self.groups if group.kept][: self._num_groups]
        is_full = len(kept) == self._num_groups
        reach = self.groups.index(kept[-1]) + 1 if is_full else len(self.groups)
        within, behind = self.groups[:reach], self.groups[reach:]
        done = [group for group in within if group.verdict is not None]
        stragglers = [group for group in within if group.verdict is None]
        verdicts = [group.verdict for group in done if group.verdict is not None]
        carried = await self._carry([*stragglers, *behind])
        dropped = [group for group in stragglers if group not in carried]
        self._source.put_back([group.prompt for group in behind if group not in carried])
        for group in carried:
            group.num_carried += 1
        num_started = len(self.groups) - self._num_resumed
        collected = Collected(
            trees=[group.tree for group in kept],
            seen=[group.tree for group in done],
            verdicts=verdicts,
            version=self._context.generator.version,
            pending=[one for group in done for one in group.pending],
            used=[group.prompt for group in (*done, *dropped)],
            counts={
                "groups_started": num_started,
                "groups_resumed": self._num_resumed,
                "groups_reused": sum(group.is_reused for group in self.groups),
                "groups_behind": len(behind),
                "refill_rounds": ceil(self._num_replaced / self._num_groups),
                "stragglers": len(stragglers),
                "stragglers_dropped": len(dropped),
                "carried_over": len(carried),
                "steps_carried_max": max((group.num_carried for group in kept), default=0),
            },
        )
        return collected, carried

    async def _carry(self, left: list[Group]) -> list[Group]:
        """Those of the groups that the next step goes on with; all others have ended then."""
        carried: list[Group] = []
        if self._config.carry_over:
            await hold_groups(group for group in left if group.verdict is None)
            self._judge()
            carried = [group for group in left if group.kept or group.rests]
        bug = await end_groups(group for group in left if group not in carried)
        if bug is not None:
            raise bug
        return carried

    def _is_complete(self) -> bool:
        """Whether B groups are kept and everything before the last of them has finished."""
        num_kept = 0
        for group in self.groups:
            if group.verdict is None:
                return False
            num_kept += group.kept
            if num_kept == self._num_groups:
                return True
        return False

    def _start(self, num_prompts: int) -> None:
        if not num_prompts:
            return
        prompts = self._source.next(num_prompts)
        check_prompts(prompts, self._context.max_model_len)
        keys = [self._keys.take(prompt) for prompt in prompts]
        if goes_in_rounds(self._context):
            new = start_rounds(self._context, prompts, keys, self._rubric)
        else:
            new = [
                start_group(self._context, prompt, key, self._rubric)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
        for group in new:
            group.task.add_done_callback(self._note)
        self.groups += new

    def _note(self, task: asyncio.Task[object]) -> None:
        del task
        self._news.set()

    def _judge(self) -> None:
        for group in self.groups:
            if group.verdict is None and group.task.done():
                group.finish(self._context)

    def _replace(self) -> None:
        """Start as many as it takes for B to be possible."""
        num_possible = sum(group.verdict is None or group.kept for group in self.groups)
        num_missing = max(0, self._num_groups - num_possible)
        if self._num_replaced + num_missing > MAX_ROUNDS * self._num_groups:
            raise ValueError(self._nothing_fits())
        self._num_replaced += num_missing
        self._start(num_missing)

    def _set(self, clock: asyncio.Timeout) -> None:
        """Start the stragglers' time when the quorum is there."""
        if not self._config.straggler_s or clock.when() is not None:
            return
        quorum = max(1, ceil(self._config.quorum * self._num_groups - ROUNDING))
        if sum(group.kept for group in self.groups) >= quorum:
            now_s = asyncio.get_running_loop().time()
            clock.reschedule(now_s + self._config.straggler_s)

    def _nothing_fits(self) -> str:
        config, done = self._config, [group for group in self.groups if group.verdict is not None]
        num = {verdict: sum(group.verdict is verdict for group in done) for verdict in Verdict}
        means = [group_mean(group.tree, config.filter_key) for group in done]
        known = sorted(mean for mean in means if mean is not None)
        spread = (
            f"means from {known[0]:.3g} to {known[-1]:.3g}, median {known[len(known) // 2]:.3g}"
            if known
            else "no group with two trajectories that did not fail"
        )
        cause = max((one for one in Verdict if one is not Verdict.kept), key=num.__getitem__)
        causes = {
            Verdict.low: "the prompts are too hard for the policy, or the reward never fires",
            Verdict.high: "the prompts are too easy for the policy by now",
            Verdict.failed: "engine or tools fail; their logs say why",
        }
        low, high = config.filter_range
        return (
            f"rollout.filter_key={config.filter_key}: got {num[Verdict.kept]} groups to train on, "
            f"expected data.prompts_per_step={self._num_groups} after "
            f"{MAX_ROUNDS} rounds of replacements; of "
            f"{len(done)} finished groups {num[Verdict.low]} have a mean at or "
            f"below rollout.filter_range[0]={low:g}, {num[Verdict.high]} at or above "
            f"rollout.filter_range[1]={high:g}, {num[Verdict.failed]} failed ({spread}); "
            f"probable cause: {causes[cause]}"
        )
