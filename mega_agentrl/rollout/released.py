"""`rollout.branching=released`: ARPO's published rollout, decision for decision, in lock-step.

All trajectories of all prompts go in rounds; a round waits for its slowest request, then for
its slowest tool:

1. One engine request for every active trajectory, with one limit for all: the largest number
   of tokens that any of them still lacks. Others overshoot their length and are cut at the end.
2. The entropy H of the segment just sampled (`algo.branching.released_segment_entropy`); the
   first one of a trajectory is its baseline, of a fork as of a root.
3. Calls run, their answers are appended, what is full ends (see `released_path`).
4. Every active trajectory may be copied up to `forks_per_decision` times while its prompt has
   fewer than M, in order of creation; each copy has a coin of its own,
   `algo.branching.released_should_branch`.
5. A prompt with no active trajectory and fewer than M gets one fresh root.

So H is of the segment before the answer, delta is 0 at everyone's first decision, and missing
trajectories are made one after the other: that is how it was published. Two faults are not
repeated unless a `PublishedFaults` is given: baselines that outlive the batch, so that the n-th
trajectory is compared with another prompt's, and coins from an unseeded stream. Answers reach
the policy unescaped, which the tools are told where they are built. Not repeated at all: tools
run again after an empty answer, and tokens that a tokenizer adds to an answer.

Gives the records of the asynchronous tree, with three readings of their own: a `Decision` is
one coin, its entropies are H and the baseline (sums over tokens, divided by ln V), its
`probability` is the closed form and its `threshold` the coin; `baseline_entropy` is the path's
own; a forced end of turn has loss mask 1. `rollout.branch.budget` is not read: low paths get
first pick.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.branching import (
    RELEASED_WINDOW_TOKENS,
    released_segment_entropy,
    released_should_branch,
)
from mega_agentrl.rollout.branching import configured_roots
from mega_agentrl.rollout.released_path import NUM_TOP_LOGPS, ReleasedPath
from mega_agentrl.rollout.seeds import SEED_BITS, request_seed
from mega_agentrl.types.records import Decision, RolloutTree

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence
    from typing import Any

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.records import Generation, Prompt

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PublishedFaults:
    """Two faults of the released code, to compare with runs that had them.

    baselines: by number of the trajectory in its batch; kept from batch to batch.
    coin: a number in [0, 1), from one stream for all prompts.
    """

    baselines: dict[int, float] = field(default_factory=dict)
    coin: Callable[[], float] = random.random


@dataclass(slots=True, kw_only=True, frozen=True)
class Round:
    """What happened in one round; trajectories by their number in the batch."""

    max_tokens: int
    active: tuple[int, ...]
    decisions: tuple[tuple[int, Decision], ...]
    new: tuple[int, ...]


class ReleasedBatch:
    """The trajectories of one batch of prompts; `run` once.

    keys: unique names of the prompts. rounds: what happened, for tests and for the curious.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompts: Sequence[Prompt],
        keys: Sequence[str],
        faults: PublishedFaults | None = None,
    ) -> None:
        self.rounds: list[Round] = []
        self.paths: list[ReleasedPath] = []
        self._context = context
        self._prompts = list(zip(prompts, keys, strict=True))
        self._num_roots = [0] * len(self._prompts)
        self._num_made = [0] * len(self._prompts)
        self._active: list[ReleasedPath] = []
        self._faults = faults
        self._baselines = faults.baselines if faults else {}

    async def run(self) -> list[RolloutTree]:
        """A tree per prompt, in order; raises what is a bug and frees every tool first."""
        config = self._context.config
        num_roots = configured_roots(config.branch, config.num_trajectories)
        try:
            new = [self._make(i) for i in range(len(self._prompts)) for _ in range(num_roots)]
            await self._start(new)
            while self._active:
                await self._take_round()
        finally:
            for path in self.paths:
                # Paths that were cancelled before they ended still hold their tools.
                await path.release()
        _log.info("%d trajectories in %d rounds", len(self.paths), len(self.rounds))
        return [self._tree(sample) for sample in range(len(self._prompts))]

    async def _take_round(self) -> None:
        active, self._active = self._active, []
        max_tokens = max(1, *(path.limit - len(path.tape) for path in active))
        await _together(path.speak(max_tokens) for path in active)
        for path in active:
            if path.segment is not None:
                self._baselines.setdefault(path.number, self._entropy(path.segment))
        await _together(path.use_tool() for path in active if path.call is not None)
        for path in active:
            path.drop_if_full()
        await _together(path.finish() for path in active if not path.active)
        self._active = [path for path in active if path.active]
        decisions, forks = self._branch(self._active)
        busy = {path.sample for path in self._active}
        missing = [
            sample
            for sample in range(len(self._prompts))
            if sample not in busy and self._num_missing(sample)
        ]
        new = [*forks, *(self._make(sample) for sample in missing)]
        await self._start(new)
        self.rounds.append(
            Round(
                max_tokens=max_tokens,
                active=tuple(path.number for path in active),
                decisions=tuple(decisions),
                new=tuple(path.number for path in new),
            )
        )

    def _branch(
        self, survivors: Sequence[ReleasedPath]
    ) -> tuple[list[tuple[int, Decision]], list[ReleasedPath]]:
        """Toss the coins; decisions in order, and the forks, not yet started."""
        decisions: list[tuple[int, Decision]] = []
        forks: list[ReleasedPath] = []
        most = self._context.config.branch.forks_per_decision
        for sample in dict.fromkeys(path.sample for path in survivors):
            for path in survivors:
                if path.sample != sample:
                    continue
                for _ in range(min(most, self._num_missing(sample))):
                    decision = self._decide(path)
                    path.decisions.append(decision)
                    decisions.append((path.number, decision))
                    if decision.num_forks:
                        forks.append(self._make(sample, path))
        return decisions, forks

    def _decide(self, path: ReleasedPath) -> Decision:
        """One coin."""
        assert path.segment is not None, "only who has spoken is asked"
        config = self._context.config.branch
        entropy, baseline = self._entropy(path.segment), self._baselines[path.number]
        probability, weight = config.alpha, config.beta
        delta, u = entropy - baseline, self._coin(path)
        forks = released_should_branch(
            u, delta, branch_probability=probability, entropy_weight=weight
        )
        share = min(max(probability + weight * delta, 0.0), 1.0)
        return Decision(
            path=path.path,
            at=len(path.tape),
            slots=self._num_missing(path.sample),
            baseline=baseline,
            probe_entropies=(entropy,),
            num_forks=int(forks),
            probability=1.0 if probability >= 1 else share,
            threshold=u,
        )

    def _coin(self, path: ReleasedPath) -> float:
        """U[0, 1), from where it is tossed in the run and not from when."""
        if self._faults is not None:
            return self._faults.coin()
        context, key = self._context, self._prompts[path.sample][1]
        num_tossed = len(path.decisions)
        seed = request_seed(context.seed, context.step, f"{key}/coin", path.path, num_tossed, 0)
        return seed / float(1 << SEED_BITS)

    def _entropy(self, segment: Generation) -> float:
        """H; raises `ValueError` where the engine gave no log-probs to compute it from."""
        if segment.token_ids and not segment.top_logps:
            raise ValueError(
                f"request {segment.request_id}: the engine returned no log-probs of the most "
                f"probable tokens, expected {NUM_TOP_LOGPS} per position; probable cause: it "
                "ignores num_top_logps, which rollout.branching=released asks for"
            )
        rows = segment.top_logps[:RELEASED_WINDOW_TOKENS]
        width = max(map(len, rows), default=0)
        padded = [[*row, *[-torch.inf] * (width - len(row))] for row in rows]
        logprob_TK = torch.tensor(padded, dtype=torch.float64).reshape(len(rows), width)
        return released_segment_entropy(logprob_TK, self._context.codec.vocab_size)

    def _num_missing(self, sample: int) -> int:
        return self._context.config.num_trajectories - self._num_made[sample]

    def _make(self, sample: int, parent: ReleasedPath | None = None) -> ReleasedPath:
        """The next root of a prompt, or the next fork of a path; not yet started."""
        prompt, key = self._prompts[sample]
        self._num_made[sample] += 1
        if parent is None:
            tree_path: tuple[int, ...] = (self._num_roots[sample],)
            self._num_roots[sample] += 1
        else:
            tree_path = (*parent.path, parent.num_children)
            parent.num_children += 1
        path = ReleasedPath(
            self._context,
            prompt,
            key,
            sample=sample,
            path=tree_path,
            number=len(self.paths),
            parent=parent,
        )
        self.paths.append(path)
        return path

    async def _start(self, paths: Sequence[ReleasedPath]) -> None:
        """Let them take part in the next round, who could not be started as well.

        Forks of one parent are made one after the other: they copy the same tools.
        """
        families: dict[object, list[ReleasedPath]] = {}
        for path in paths:
            families.setdefault(path.parent or path, []).append(path)
        await _together(_open_each(family) for family in families.values())
        self._active += paths

    def _tree(self, sample: int) -> RolloutTree:
        paths = [path for path in self.paths if path.sample == sample]
        expected = self._context.config.num_trajectories
        assert len(paths) == expected, f"{len(paths)} trajectories of {expected}"
        first_roots = configured_roots(self._context.config.branch, expected)
        records = [path.record(self._baselines.get(path.number)) for path in paths]
        return RolloutTree(
            prompt=self._prompts[sample][0],
            trajectories=sorted(records, key=lambda record: record.path),
            num_forks=sum(record.parent_id is not None for record in records),
            num_top_ups=self._num_roots[sample] - first_roots,
        )


async def _open_each(paths: Sequence[ReleasedPath]) -> None:
    for path in paths:
        await path.open()


async def _together(steps: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the steps at once and wait for all; a bug in one ends the others."""
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(step)
