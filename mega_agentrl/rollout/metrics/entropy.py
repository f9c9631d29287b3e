"""Entropy by token offset, in first turns and in turns right after a tool answer.

ARPO branches after tool answers because the entropy rises there (arXiv 2507.19849). Offsets count
sampled tokens from the start of a turn. `root` refers to first turns, `after_tool` to assistant
turns after a tool answer. Every sampled token counts once; failed trajectories are included. All
entropies are in nats. Curves hold sums and counts, so that the curves of several steps can be
added; metrics are means over buckets of offsets. Few turns reach the last bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.records import Trajectory, Turn

NUM_OFFSETS = 51
BUCKET_STARTS = (0, 5, 10, 20, 35)
"""First offset of each bucket."""
WINDOW_TOKENS = 20
"""Tokens at the start of a turn that `entropy_root` and `entropy_after_tool` cover."""


@dataclass(slots=True, kw_only=True, frozen=True)
class EntropyByOffset:
    """Sum of entropies and number of tokens at each offset from 0 to 50."""

    sums: tuple[float, ...] = (0.0,) * NUM_OFFSETS
    counts: tuple[int, ...] = (0,) * NUM_OFFSETS

    def __add__(self, other: EntropyByOffset) -> EntropyByOffset:
        return EntropyByOffset(
            sums=tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
        )

    def mean(self, start: int = 0, stop: int = NUM_OFFSETS) -> float | None:
        """Return the mean over offsets [start, stop), or None without tokens."""
        count = sum(self.counts[start:stop])
        return sum(self.sums[start:stop]) / count if count else None

    def bucket_means(self) -> dict[int, float]:
        """Return the means by first offset of the bucket, without empty buckets."""
        ends = pairwise((*BUCKET_STARTS, NUM_OFFSETS))
        means = {start: self.mean(start, stop) for start, stop in ends}
        return {start: mean for start, mean in means.items() if mean is not None}


@dataclass(slots=True, kw_only=True, frozen=True)
class EntropyCurves:
    """The entropy curves of first turns and of turns after a tool answer."""

    root: EntropyByOffset = EntropyByOffset()
    after_tool: EntropyByOffset = EntropyByOffset()

    def __add__(self, other: EntropyCurves) -> EntropyCurves:
        return EntropyCurves(
            root=self.root + other.root, after_tool=self.after_tool + other.after_tool
        )

    def to_summary(self) -> dict[str, list[float | None]]:
        """Return means and token counts per offset, for the summary of a run."""
        return {
            "root": [self.root.mean(i, i + 1) for i in range(NUM_OFFSETS)],
            "after_tool": [self.after_tool.mean(i, i + 1) for i in range(NUM_OFFSETS)],
            "num_root": list(self.root.counts),
            "num_after_tool": list(self.after_tool.counts),
        }


def collect_entropy_curves(trajectories: Sequence[Trajectory]) -> EntropyCurves:
    """Compute the curves of all trajectories of whole trees."""
    root: list[tuple[int, list[float]]] = []
    after_tool: list[tuple[int, list[float]]] = []
    for trajectory in trajectories:
        for previous_role, turn in _turns_not_inherited(trajectory):
            start = max(turn.start, trajectory.fork_len)
            num_inherited = sum(trajectory.loss_mask[turn.start : start])
            entropies = _sampled_entropies(trajectory, start, turn.stop)
            if turn.role is Role.assistant and previous_role is None:
                root.append((num_inherited, entropies))
            elif turn.role is Role.assistant and previous_role is Role.tool:
                after_tool.append((num_inherited, entropies))
    return EntropyCurves(
        root=_accumulate_by_offset(root), after_tool=_accumulate_by_offset(after_tool)
    )


def entropy_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over all sampled tokens, the first `WINDOW_TOKENS` of turns, and buckets."""
    curves = collect_entropy_curves(trajectories)
    entropies = [
        entropy
        for trajectory in trajectories
        for entropy in _sampled_entropies(
            trajectory, trajectory.fork_len, len(trajectory.token_ids)
        )
    ]
    values = {
        "entropy": sum(entropies) / len(entropies) if entropies else 0.0,
        "entropy_root": curves.root.mean(0, WINDOW_TOKENS) or 0.0,
        "entropy_after_tool": curves.after_tool.mean(0, WINDOW_TOKENS) or 0.0,
    }
    for name in ("root", "after_tool"):
        means: EntropyByOffset = getattr(curves, name)
        values |= {f"entropy_{name}/{start}": mean for start, mean in means.bucket_means().items()}
    return values


def _turns_not_inherited(trajectory: Trajectory) -> Iterator[tuple[Role | None, Turn]]:
    """Yield the turns not wholly inherited, each with the role of the preceding turn."""
    previous_role: Role | None = None
    for turn in trajectory.turns:
        if turn.start >= trajectory.fork_len or turn.stop > trajectory.fork_len:
            yield previous_role, turn
        previous_role = turn.role


def _sampled_entropies(trajectory: Trajectory, start: int, stop: int) -> list[float]:
    """Return the entropies of the sampled tokens in [start, stop)."""
    pairs = zip(trajectory.entropies[start:stop], trajectory.loss_mask[start:stop], strict=True)
    return [entropy for entropy, mask in pairs if mask]


def _accumulate_by_offset(turns: Sequence[tuple[int, Sequence[float]]]) -> EntropyByOffset:
    """Accumulate the entropies of turns, each with the offset of its first one in the turn."""
    sums, counts = [0.0] * NUM_OFFSETS, [0] * NUM_OFFSETS
    for first, entropies in turns:
        for offset, entropy in zip(range(first, NUM_OFFSETS), entropies, strict=False):
            sums[offset] += entropy
            counts[offset] += 1
    return EntropyByOffset(sums=tuple(sums), counts=tuple(counts))
