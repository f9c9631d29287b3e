"""Where the paths of a rollout tree are drawn: a lane each, forks below the path they leave.

Lane 0 is at the top. A path's forks follow it, the last one that left it nearest, each with its
own forks: a line down from a fork then crosses no lane that began before it::

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


def parents_of(paths: Sequence[Trajectory]) -> list[int | None]:
    """Index of each path's parent, None of a root; `ValueError` for one that comes later."""
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


def lanes_of(paths: Sequence[Trajectory]) -> list[int]:
    """Lane of each path; they are 0 ... P-1, each once."""
    parents = parents_of(paths)
    forks: list[list[int]] = [[] for _ in paths]
    for number, parent in enumerate(parents):
        if parent is not None:
            forks[parent].append(number)
    lanes = [0] * len(paths)
    waiting = [number for number, parent in enumerate(parents) if parent is None][::-1]
    for lane in range(len(paths)):
        number = waiting.pop()
        lanes[number] = lane
        # The last one put on is the next one drawn: the latest fork, of equals the first.
        waiting += sorted(forks[number], key=lambda one: (paths[one].fork_len, -one))
    return lanes
