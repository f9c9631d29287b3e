"""ARPO's released rollout, reproduced decision by decision (`rollout.branching=released`).

All trajectories of all prompts advance in rounds. A round waits for its slowest request, then for
its slowest tool:

1. Each active trajectory sends one engine request. All requests have the same token limit: the
   largest number of tokens that any of them may still produce. The others overshoot their length
   and are truncated at the end.
2. The entropy H of each sampled segment is computed (`algo.branching.released_segment_entropy`).
   The first H of a trajectory, whether root or fork, is its baseline.
3. Tool calls run, their answers are appended, and full trajectories end (see
   `lockstep_trajectory`).
4. In order of creation, each active trajectory may be copied up to
   `rollout.branch.num_forks_per_decision` times while its prompt has fewer than M trajectories.
   Each copy draws its own random number (`algo.branching.released_should_branch`).
5. A prompt without active trajectories and with fewer than M trajectories gets one new root.

As in the released code, H belongs to the segment before the answer, delta is 0 at the first
decision of each trajectory, and missing trajectories are created one after another. Answers reach
the policy unescaped; the tools are configured for this when they are built. Not reproduced are the
repeated tool call after an empty answer, the tokens that a tokenizer adds to an answer, and two
bugs: baselines that are kept after the batch, so that the n-th trajectory is compared with one of
another prompt, and random numbers from an unseeded stream. (The golden test adds the two bugs.)

The records are those of the asynchronous tree with three differences. A `BranchDecision` stands
for one random draw: its entropies are H and the baseline (sums over tokens, divided by ln V), its
`probability` is the closed form and its `threshold` the number drawn. `baseline_entropy` belongs to
the path itself. A forced end of turn has loss mask 1. `rollout.branch.fork_budget` is ignored:
paths created first fork first.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mega_agentrl.algo.branching import (
    RELEASED_WINDOW_TOKENS,
    released_segment_entropy,
    released_should_branch,
)
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.branching.lockstep_trajectory import NUM_TOP_LOGPS, LockstepTrajectory
from mega_agentrl.rollout.branching.policy import num_configured_roots
from mega_agentrl.rollout.generation.turn_generator import (
    SEED_BITS,
    pad_top_logps,
    request_seed,
)
from mega_agentrl.types.records import BranchDecision, RolloutTree

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence
    from typing import Any

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.records import Generation, Prompt

_log = logging.getLogger(__name__)


class LockstepArpoRollout:
    """Samples the trajectories of a batch of prompts in lock-step; call `run` once.

    `keys` name the prompts uniquely in the pass.
    """

    def __init__(
        self, context: RolloutContext, prompts: Sequence[Prompt], keys: Sequence[str]
    ) -> None:
        self.trajectories: list[LockstepTrajectory] = []
        """All trajectories so far, in the order of creation."""
        self._context = context
        self._prompts = list(zip(prompts, keys, strict=True))
        self._num_roots = [0] * len(self._prompts)
        self._num_created = [0] * len(self._prompts)
        self._active: list[LockstepTrajectory] = []
        self._baselines: dict[int, float] = {}

    async def run(self) -> list[RolloutTree]:
        """Return one unscored tree per prompt, in order; tools are freed in any case."""
        config = self._context.config
        num_roots = num_configured_roots(config.branch, config.group_size)
        try:
            new = [
                self._make_trajectory(i)
                for i in range(len(self._prompts))
                for _ in range(num_roots)
            ]
            await self._open_trajectories(new)
            while self._active:
                await self._run_round()
        finally:
            for path in self.trajectories:
                await path.release()  # a cancelled trajectory still holds its tools
        _log.info("%d trajectories of %d prompts", len(self.trajectories), len(self._prompts))
        return [self._build_tree(index) for index in range(len(self._prompts))]

    async def _run_round(self) -> None:
        active, self._active = self._active, []
        max_tokens = max(1, *(path.max_tokens - len(path.token_buffer) for path in active))
        await _run_concurrently(path.generate_segment(max_tokens) for path in active)
        for path in active:
            if path.segment is not None:
                self._baselines.setdefault(
                    path.trajectory_index, self._segment_entropy(path.segment)
                )
        await _run_concurrently(path.run_tool() for path in active if path.pending_call is not None)
        for path in active:
            path.stop_if_full()
        await _run_concurrently(path.finalize() for path in active if not path.is_active)
        self._active = [path for path in active if path.is_active]
        forks = self._fork_active()
        active_prompts = {path.prompt_index for path in self._active}
        missing = [
            index
            for index in range(len(self._prompts))
            if index not in active_prompts and self._num_missing(index)
        ]
        new = [*forks, *(self._make_trajectory(index) for index in missing)]
        await self._open_trajectories(new)

    def _fork_active(self) -> list[LockstepTrajectory]:
        """Draw for each possible fork of the active paths; return the forks, not yet opened."""
        forks: list[LockstepTrajectory] = []
        max_forks = self._context.config.branch.num_forks_per_decision
        for prompt_index in dict.fromkeys(path.prompt_index for path in self._active):
            for path in self._active:
                if path.prompt_index != prompt_index:
                    continue
                for _ in range(min(max_forks, self._num_missing(prompt_index))):
                    decision = self._decide(path)
                    path.decisions.append(decision)
                    if decision.num_forks:
                        forks.append(self._make_trajectory(prompt_index, path))
        return forks

    def _decide(self, path: LockstepTrajectory) -> BranchDecision:
        """Draw once whether to fork `path`."""
        assert path.segment is not None, "decisions need a sampled segment"
        config = self._context.config.branch
        entropy = self._segment_entropy(path.segment)
        baseline = self._baselines[path.trajectory_index]
        probability, weight = config.alpha, config.beta
        delta, u = entropy - baseline, self._draw_uniform(path)
        should_fork = released_should_branch(
            u, delta, branch_probability=probability, entropy_weight=weight
        )
        clamped = min(max(probability + weight * delta, 0.0), 1.0)
        return BranchDecision(
            path=path.path,
            position=len(path.token_buffer),
            num_slots_left=self._num_missing(path.prompt_index),
            baseline_entropy=baseline,
            probe_entropies=(entropy,),
            num_forks=int(should_fork),
            probability=1.0 if probability >= 1 else clamped,
            threshold=u,
        )

    def _draw_uniform(self, path: LockstepTrajectory) -> float:
        """Draw from U[0, 1), seeded by the position in the tree and not by time."""
        context, key = self._context, self._prompts[path.prompt_index][1]
        num_draws = len(path.decisions)
        seed = request_seed(context.seed, context.step, f"{key}/coin", path.path, num_draws, 0)
        return seed / float(1 << SEED_BITS)

    def _segment_entropy(self, segment: Generation) -> float:
        """Return H of a segment; raise `ValueError` if the engine returned no top log-probs."""
        if segment.token_ids and not segment.top_logps:
            raise InputError(
                f"request {segment.request_id}: top_logps of the engine",
                "none",
                f"log-probs of the {NUM_TOP_LOGPS} most probable tokens per position",
                "it ignores num_top_logps, which rollout.branching=released asks for",
            )
        rows = segment.top_logps[:RELEASED_WINDOW_TOKENS]
        logprob_TK = pad_top_logps(rows, width=max(map(len, rows), default=0))
        return released_segment_entropy(logprob_TK, self._context.codec.vocab_size)

    def _num_missing(self, prompt_index: int) -> int:
        return self._context.config.group_size - self._num_created[prompt_index]

    def _make_trajectory(
        self, prompt_index: int, parent: LockstepTrajectory | None = None
    ) -> LockstepTrajectory:
        """Return the next root of a prompt, or the next fork of `parent`, not yet opened."""
        prompt, key = self._prompts[prompt_index]
        self._num_created[prompt_index] += 1
        if parent is None:
            tree_path: tuple[int, ...] = (self._num_roots[prompt_index],)
            self._num_roots[prompt_index] += 1
        else:
            tree_path = (*parent.path, parent.num_children)
            parent.num_children += 1
        path = LockstepTrajectory(
            self._context,
            prompt,
            key,
            prompt_index=prompt_index,
            path=tree_path,
            trajectory_index=len(self.trajectories),
            parent=parent,
        )
        self.trajectories.append(path)
        return path

    async def _open_trajectories(self, paths: Sequence[LockstepTrajectory]) -> None:
        """Open trajectories and let them take part in the next round, even if opening failed.

        Forks of one parent open one after another, because they copy the same tools.
        """
        by_parent: dict[LockstepTrajectory, list[LockstepTrajectory]] = {}
        for path in paths:
            by_parent.setdefault(path.parent or path, []).append(path)
        await _run_concurrently(_open_in_order(forks) for forks in by_parent.values())
        self._active += paths

    def _build_tree(self, prompt_index: int) -> RolloutTree:
        paths = [path for path in self.trajectories if path.prompt_index == prompt_index]
        expected = self._context.config.group_size
        assert len(paths) == expected, f"{len(paths)} trajectories of {expected}"
        first_roots = num_configured_roots(self._context.config.branch, expected)
        records = [path.to_trajectory(self._baselines.get(path.trajectory_index)) for path in paths]
        return RolloutTree(
            prompt=self._prompts[prompt_index][0],
            trajectories=sorted(records, key=lambda record: record.path),
            num_forks=sum(record.parent_id is not None for record in records),
            num_extra_roots=self._num_roots[prompt_index] - first_roots,
        )


async def _open_in_order(paths: Sequence[LockstepTrajectory]) -> None:
    for path in paths:
        await path.open_session()


async def _run_concurrently(steps: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the steps concurrently and wait for all; an exception in one cancels the others."""
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(step)
