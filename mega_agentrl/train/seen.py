"""What the finished trajectories of a step, or of a pass, showed: the matter of ARES's statistics.

All training groups are looked at, before any filter; left out are trajectories that failed or
have no reward. Entropies are the engine's: exact, of the distribution that was sampled from, and
there for filtered groups too, which no log-prob pass ever sees. One source for threshold, counts
and masks keeps a window on the same side of the threshold in all of them.

A window never leaves its turn. Sampled tokens of two turns may touch, where nothing was said in
between, so tokens are laid out with a gap for each turn before `algo.hwe` sees them.

B trajectories, N response tokens of one of them; R the trajectories of one tree, S their layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.algo.hwe import threshold_p95, window_entropy
from mega_agentrl.algo.masking import masked_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """B finished trajectories, in the order of their trees.

    ids: of the trajectories. prompt_ids: equal = one group. correct_B: [B] bool. p95_B: [B]
    float32 of `hwe.threshold_p95`, nats, NaN without a sampled token. entropy_B: [B] float32 mean
    of the sampled tokens, nats. windows: per trajectory [N] float32 window entropy of each token
    that may start a window, nats; NaN elsewhere.
    """

    ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    correct_B: torch.Tensor
    p95_B: torch.Tensor
    entropy_B: torch.Tensor
    windows: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in self.__slots__}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Seen: expected one length for all of these, got {lengths}")

    def hwe_B(self, threshold: float | None) -> torch.Tensor:
        """[B] int64 windows at or above the threshold, in nats; none where there is none."""
        if threshold is None:
            return torch.zeros(len(self.ids), dtype=torch.int64)
        counts = [int((window_N >= threshold).sum()) for window_N in self.windows]
        return torch.tensor(counts, dtype=torch.int64)


def observe(trees: Iterable[RolloutTree], trigger_ids: Collection[int] | None) -> Seen:
    """What the trees showed. trigger_ids: tokens whose arg-max starts a window; None: all do.

    Raises `ValueError` for a trajectory without arg-max tokens where they are needed.
    """
    kept = [[one for one in tree.trajectories if counts(one)] for tree in trees]
    listed = None if trigger_ids is None else torch.tensor(sorted(trigger_ids))
    measured = [_measure(group, listed) for group in kept if group]
    everyone = [one for group in kept for one in group]
    return Seen(
        ids=tuple(one.trajectory_id for one in everyone),
        prompt_ids=tuple(one.prompt.prompt_id for one in everyone),
        correct_B=torch.tensor([_correct(one) for one in everyone], dtype=torch.bool),
        p95_B=torch.cat([torch.zeros(0), *(p95_R for p95_R, _, _ in measured)]),
        entropy_B=torch.cat([torch.zeros(0), *(mean_R for _, mean_R, _ in measured)]),
        windows=tuple(window_N for _, _, windows in measured for window_N in windows),
    )


def counts(trajectory: Trajectory) -> bool:
    """Whether it says something about the policy."""
    return not trajectory.failed and trajectory.score is not None


def _correct(trajectory: Trajectory) -> bool:
    assert trajectory.score is not None
    return trajectory.score.correct


def _measure(
    group: Sequence[Trajectory], listed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """[R] 95th percentile, [R] mean entropy, and the windows of each trajectory of a tree."""
    places = [_places(one) for one in group]
    width = max((int(place_N[-1]) + 1 for place_N in places if len(place_N)), default=0)
    entropy_RS = torch.zeros(len(group), width)
    sampled_RS = torch.zeros(len(group), width, dtype=torch.bool)
    for row, (one, place_N) in enumerate(zip(group, places, strict=True)):
        entropy_RS[row, place_N] = _tensor(one.entropies, "f4")
        sampled_RS[row, place_N] = _small(one.loss_mask).bool()
    window_RS = window_entropy(entropy_RS, sampled_RS)
    windows = [
        _triggered(one, window_RS[row, place_N], listed)
        for row, (one, place_N) in enumerate(zip(group, places, strict=True))
    ]
    mean_R = masked_mean(entropy_RS, sampled_RS, 1)
    return threshold_p95(entropy_RS, sampled_RS), mean_R, windows


def _places(trajectory: Trajectory) -> torch.Tensor:
    """[N] where its tokens lie: in order, with a gap between two turns."""
    ids = trajectory.turn_ids
    turn_N = _small(ids).long() if len(trajectory.turns) <= 256 else _tensor(ids, "i8")
    return turn_N + torch.arange(len(turn_N))


def _tensor(values: Sequence[float], dtype: str) -> torch.Tensor:
    """numpy reads a list several times as fast as torch does, and there are millions."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _small(values: Sequence[int]) -> torch.Tensor:
    """[N] uint8 of numbers below 256, which are read another four times as fast."""
    return torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.zeros(0)


def _triggered(
    trajectory: Trajectory, window_N: torch.Tensor, listed: torch.Tensor | None
) -> torch.Tensor:
    """The windows without those that no trigger starts."""
    if listed is None:
        return window_N
    if len(trajectory.argmax_ids) != len(window_N):
        raise ValueError(
            f"trajectory {trajectory.trajectory_id}: got {len(trajectory.argmax_ids)} argmax_ids "
            f"for {len(window_N)} tokens, expected one each, as algo.ares.words asks for; "
            "probable cause: it was read from a file of an older version"
        )
    argmax_N = _tensor(trajectory.argmax_ids, "i8")
    return torch.where(torch.isin(argmax_N, listed), window_N, torch.nan)
