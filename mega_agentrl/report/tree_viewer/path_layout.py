"""Assign the paths of a rollout tree to lanes, with forks below their parent.

Lane 0 is at the top. A path is followed by its forks, the latest fork first, each with its own
forks. The line from a parent down to a fork then crosses no lane that starts before it::

    lane 0   0    ----------+-----+----->     forked at 10 (path 0.0) and at 16 (path 0.1)
    lane 1   0.1            |     +------->
    lane 2   0.0            +-------->
    lane 3   1    -------------->             another root
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.records import Trajectory


def parent_indices(paths: Sequence[Trajectory]) -> list[int | None]:
    """Return the index of each path's parent, None for a root.

    Raises:
        ValueError: a parent is missing or comes after its fork.
    """
    index: dict[str, int] = {}
    found: list[int | None] = []
    for number, one in enumerate(paths):
        if one.parent_id is not None and one.parent_id not in index:
            raise ValueError(
                f"trajectory {one.trajectory_id}: got the parent {one.parent_id}, expected one "
                "that comes earlier in its tree"
            )
        found.append(None if one.parent_id is None else index[one.parent_id])
        index[one.trajectory_id] = number
    return found


def assign_lanes(paths: Sequence[Trajectory]) -> list[int]:
    """Return the lane of each path, a permutation of 0 ... P-1."""
    parents = parent_indices(paths)
    forks: list[list[int]] = [[] for _ in paths]
    for number, parent in enumerate(parents):
        if parent is not None:
            forks[parent].append(number)
    lanes = [0] * len(paths)
    waiting = [number for number, parent in enumerate(parents) if parent is None][::-1]
    for lane in range(len(paths)):
        number = waiting.pop()
        lanes[number] = lane
        # The stack's top is placed next: the latest fork, among equals the first.
        waiting += sorted(forks[number], key=lambda one: (paths[one].fork_len, -one))
    return lanes
