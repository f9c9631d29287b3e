"""Statistics of finished trajectories for ARES.

All training groups count, before any filter; trajectories that failed or have no reward are left
out. Entropies are the engine's: exact, of the distribution that was sampled from, and available for
filtered groups too, which no log-prob pass sees. Threshold, counts and masks use the same source,
so that a window is on the same side of the threshold in all of them.

A window never crosses the border of a turn. Because the sampled tokens of two turns may touch, the
tokens are laid out with a gap between turns before `algo.ares.entropy_windows` sees them.

B trajectories, N response tokens of one of them; R trajectories of one tree, S layout positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.algo.ares.entropy_windows import (
    WINDOW_TOKENS,
    hwe_count,
    threshold_p95,
    window_entropy,
)
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.groups.scoring import valid_scores

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyStats:
    """Statistics of B finished trajectories, in the order of their trees."""

    trajectory_ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    """Trajectories with equal ids form a group."""
    is_correct_B: torch.Tensor
    """[B] bool."""
    entropy_p95_B: torch.Tensor
    """[B] float32 `threshold_p95`, nats; NaN without a sampled token."""
    mean_entropy_B: torch.Tensor
    """[B] float32 mean over the sampled tokens, nats."""
    window_entropies: tuple[torch.Tensor, ...]
    """Per trajectory [N] float32, nats.

    The entropy of the window that starts at each token; NaN where no window may start.
    """

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in self.__slots__}
        if len(set(lengths.values())) > 1:
            raise InputError("lengths of EntropyStats", lengths, "the same for all fields")

    def hwe_count_B(self, threshold: float | None) -> torch.Tensor:
        """Return the number of windows at or above the threshold, [B] int64; 0 without one."""
        if threshold is None:
            return torch.zeros(len(self.trajectory_ids), dtype=torch.int64)
        counts = [
            int(hwe_count(window_1N, ~window_1N.isnan(), threshold=threshold))
            for window_1N in (window_N.unsqueeze(0) for window_N in self.window_entropies)
        ]
        return torch.tensor(counts, dtype=torch.int64)


def collect_entropy_stats(
    trees: Iterable[RolloutTree],
    trigger_ids: Collection[int] | None,
    *,
    window: int = WINDOW_TOKENS,
) -> EntropyStats:
    """Return the statistics of the trees.

    Args:
        trees: Finished trees.
        trigger_ids: Tokens whose arg-max may start a window; None allows all.
        window: Number of tokens in a window.

    Raises:
        ValueError: A trajectory has no arg-max tokens although they are needed.
    """
    groups = [
        [
            trajectory
            for trajectory in tree.trajectories
            if trajectory.score is not None and not trajectory.failed
        ]
        for tree in trees
    ]
    trigger_tensor = None if trigger_ids is None else torch.tensor(sorted(trigger_ids))
    measured = [_measure_tree(group, trigger_tensor, window) for group in groups if group]
    trajectories = [trajectory for group in groups for trajectory in group]
    is_correct = [score.correct for score in valid_scores(trajectories)]
    return EntropyStats(
        trajectory_ids=tuple(trajectory.trajectory_id for trajectory in trajectories),
        prompt_ids=tuple(trajectory.prompt.prompt_id for trajectory in trajectories),
        is_correct_B=torch.tensor(is_correct, dtype=torch.bool),
        entropy_p95_B=torch.cat([torch.zeros(0), *(p95_R for p95_R, _, _ in measured)]),
        mean_entropy_B=torch.cat([torch.zeros(0), *(mean_R for _, mean_R, _ in measured)]),
        window_entropies=tuple(window_N for _, _, windows in measured for window_N in windows),
    )


def _measure_tree(
    group: Sequence[Trajectory], trigger_tensor: torch.Tensor | None, window: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the 95th percentile [R], the mean entropy [R] and the windows of each trajectory."""
    positions = [_window_positions(trajectory) for trajectory in group]
    width = max((int(position_N[-1]) + 1 for position_N in positions if len(position_N)), default=0)
    entropy_RS = torch.zeros(len(group), width)
    sampled_RS = torch.zeros(len(group), width, dtype=torch.bool)
    for row, (trajectory, position_N) in enumerate(zip(group, positions, strict=True)):
        entropy_RS[row, position_N] = _tensor_via_numpy(trajectory.entropies, "f4")
        sampled_RS[row, position_N] = _uint8_tensor(trajectory.loss_mask).bool()
    window_RS = window_entropy(entropy_RS, sampled_RS, window=window)
    windows = [
        _mask_untriggered(trajectory, window_RS[row, position_N], trigger_tensor)
        for row, (trajectory, position_N) in enumerate(zip(group, positions, strict=True))
    ]
    mean_R = masked_mean(entropy_RS, sampled_RS, 1)
    p95_R = threshold_p95(entropy_RS, sampled_RS, window=window)
    return p95_R, mean_R, windows


def _window_positions(trajectory: Trajectory) -> torch.Tensor:
    """Return the layout position of each token, [N]: in order, with a gap between turns."""
    ids = trajectory.turn_ids
    turn_N = (
        _uint8_tensor(ids).long() if len(trajectory.turns) <= 256 else _tensor_via_numpy(ids, "i8")
    )
    return turn_N + torch.arange(len(turn_N))


def _tensor_via_numpy(values: Sequence[float], dtype: str) -> torch.Tensor:
    """Convert through NumPy, which reads long lists several times as fast as torch."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _uint8_tensor(values: Sequence[int]) -> torch.Tensor:
    """Convert numbers below 256, [N] uint8; four times as fast as `_tensor_via_numpy`."""
    return torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.zeros(0)


def _mask_untriggered(
    trajectory: Trajectory, window_N: torch.Tensor, trigger_tensor: torch.Tensor | None
) -> torch.Tensor:
    """Set windows that do not start at a trigger token to NaN."""
    if trigger_tensor is None:
        return window_N
    if len(trajectory.argmax_ids) != len(window_N):
        raise InputError(
            f"number of argmax_ids of trajectory {trajectory.trajectory_id}",
            len(trajectory.argmax_ids),
            f"{len(window_N)}, one per token, with algo.ares.trigger_words_file",
            "the engine did not record them",
        )
    argmax_N = _tensor_via_numpy(trajectory.argmax_ids, "i8")
    return torch.where(torch.isin(argmax_N, trigger_tensor), window_N, torch.nan)
