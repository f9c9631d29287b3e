"""How unsure the policy is, token by token: at its first words, and right after a tool answered.

That entropy rises after an answer is why ARPO branches there (arXiv 2507.19849). Token offset o
counts sampled tokens from the start of the turn; `root` are first turns, `after_tool` the
assistant's turns behind a tool's answer. Every sampled token counts once, failed trajectories
included: they are the policy's words. Nats. The curve keeps sums and counts, so that curves of
steps add up; as metrics it is read in buckets, the last one narrowed by the turns' ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.types.records import Trajectory, Turn

NUM_OFFSETS = 51
BUCKET_STARTS = (0, 5, 10, 20, 35)


@dataclass(slots=True, kw_only=True, frozen=True)
class OffsetMeans:
    """Sum of entropies and number of tokens at each of the offsets 0 to 50."""

    sums: tuple[float, ...] = (0.0,) * NUM_OFFSETS
    counts: tuple[int, ...] = (0,) * NUM_OFFSETS

    def __add__(self, other: OffsetMeans) -> OffsetMeans:
        return OffsetMeans(
            sums=tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
        )

    def mean(self, start: int = 0, stop: int = NUM_OFFSETS) -> float | None:
        """Over the tokens at offsets [start, stop); None where there are none."""
        count = sum(self.counts[start:stop])
        return sum(self.sums[start:stop]) / count if count else None

    def buckets(self) -> dict[int, float]:
        """Means by the first offset of each bucket; empty buckets are left out."""
        ends = pairwise((*BUCKET_STARTS, NUM_OFFSETS))
        means = {start: self.mean(start, stop) for start, stop in ends}
        return {start: mean for start, mean in means.items() if mean is not None}


@dataclass(slots=True, kw_only=True, frozen=True)
class EntropyCurve:
    """Both curves; they add up."""

    root: OffsetMeans = OffsetMeans()
    after_tool: OffsetMeans = OffsetMeans()

    def __add__(self, other: EntropyCurve) -> EntropyCurve:
        return EntropyCurve(
            root=self.root + other.root, after_tool=self.after_tool + other.after_tool
        )

    def to_plain(self) -> dict[str, Any]:
        """Sums and counts as lists; survives JSON and `from_plain` exactly."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, Any]]) -> EntropyCurve:
        """What `to_plain` wrote."""
        return cls(
            **{
                name: OffsetMeans(sums=tuple(means["sums"]), counts=tuple(means["counts"]))
                for name, means in plain.items()
            }
        )

    def as_record(self) -> dict[str, list[float | None]]:
        """Mean per offset and number of tokens, for the summary of a run."""
        return {
            "root": [self.root.mean(o, o + 1) for o in range(NUM_OFFSETS)],
            "after_tool": [self.after_tool.mean(o, o + 1) for o in range(NUM_OFFSETS)],
            "num_root": list(self.root.counts),
            "num_after_tool": list(self.after_tool.counts),
        }


def entropy_curve(trajectories: Sequence[Trajectory]) -> EntropyCurve:
    """The curves of the trajectories of whole trees."""
    root: list[list[float]] = []
    after_tool: list[list[float]] = []
    for one in trajectories:
        for before, turn in _own_turns(one):
            if turn.author is Author.assistant and before is None:
                root.append(_sampled(one, turn.start, turn.stop))
            elif turn.author is Author.assistant and before is Author.tool:
                after_tool.append(_sampled(one, turn.start, turn.stop))
    return EntropyCurve(root=_by_offset(root), after_tool=_by_offset(after_tool))


def entropy_metrics(trajectories: Sequence[Trajectory], *, window: int) -> dict[str, float]:
    """Means over everything sampled, over the first `window` tokens of the turns, by bucket."""
    curve = entropy_curve(trajectories)
    everything = [
        entropy
        for one in trajectories
        for entropy in _sampled(one, one.fork_len, len(one.token_ids))
    ]
    values = {
        "entropy": sum(everything) / len(everything) if everything else 0.0,
        "entropy_root": curve.root.mean(0, window) or 0.0,
        "entropy_after_tool": curve.after_tool.mean(0, window) or 0.0,
    }
    for name in ("root", "after_tool"):
        means: OffsetMeans = getattr(curve, name)
        values |= {f"entropy_{name}/{start}": mean for start, mean in means.buckets().items()}
    return values


def _own_turns(one: Trajectory) -> Iterator[tuple[Author | None, Turn]]:
    """Turns that no other path wrote, each with the author of the one before it."""
    before: Author | None = None
    for turn in one.turns:
        if turn.start >= one.fork_len:
            yield before, turn
        before = turn.author


def _sampled(one: Trajectory, start: int, stop: int) -> list[float]:
    """Entropies of the sampled tokens in [start, stop)."""
    marks = zip(one.entropies[start:stop], one.loss_mask[start:stop], strict=True)
    return [entropy for entropy, mask in marks if mask]


def _by_offset(turns: Sequence[Sequence[float]]) -> OffsetMeans:
    sums, counts = [0.0] * NUM_OFFSETS, [0] * NUM_OFFSETS
    for entropies in turns:
        for offset, entropy in enumerate(entropies[:NUM_OFFSETS]):
            sums[offset] += entropy
            counts[offset] += 1
    return OffsetMeans(sums=tuple(sums), counts=tuple(counts))
