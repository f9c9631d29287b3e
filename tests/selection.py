"""Choose the tests of a process: a lane of a parallel run, or a part of a long one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MAX_TESTS_TOGETHER = 50
"""Number of slow tests from which on a part may cut a file."""
ALONE_FROM_S = 60
"""A test of so many seconds is worth a fixture of its own: a part may cut it from its file."""

UNITS_S = {
    ("actor", "estimate", "gpu", "parallel"): (240, 315),  # rank processes; Megatron
    ("e2e",): (35, 120),
    ("generator",): (75, 65),  # engines
    ("runtime",): (95, 175),  # Ray
    ("escape", "sandbox", "rollout_limits"): (185, 90),
    ("config", "docs", "examples", "slurm", "tools", ""): (65, 170),
    ("reward", "tool"): (95, 45),
    ("reshard",): (40, 30),
    ("rollout",): (60, 10),
    ("train",): (40, 35),
    ("data",): (50, 0),
    ("algo", "batch", "numerics", "packages", "peers", "types", "vision"): (40, 0),
    ("report",): (10, 10),
}
"""Folders whose tests share processes or slow imports, with their seconds beside two other lanes.

The first number is for the tests of `make test`, the second for what `make test-all` has beyond it.
"""


def assign_lanes(num_lanes: int, expression: str = "") -> dict[str, int]:
    """Return the lane of each folder below `tests` ("" for the files beside the folders).

    Args:
        num_lanes: Number of processes.
        expression: The expression of `-m`: it says whether extended tests run, or only those.
    """
    quick, extended = "and extended" not in expression, "not extended" not in expression
    seconds = {unit: quick * own + extended * more for unit, (own, more) in UNITS_S.items()}
    load_s, lanes = [0] * num_lanes, {}
    for folders in sorted(seconds, key=seconds.__getitem__, reverse=True):
        lane = load_s.index(min(load_s))
        load_s[lane] += seconds[folders]
        lanes |= dict.fromkeys(folders, lane)
    return lanes


class Lane:
    """Collects the folders of one lane only, so that a lane imports just what its tests need."""

    def __init__(self, lane: int, num_lanes: int, expression: str) -> None:
        self._lane = lane
        self._lanes = assign_lanes(num_lanes, expression)

    def pytest_ignore_collect(self, collection_path):
        """Leave out what belongs to another lane."""
        if TESTS not in collection_path.parents:
            return None
        first = collection_path.relative_to(TESTS).parts[0]
        folder = first if (TESTS / first).is_dir() else ""
        return True if self._lanes.get(folder, 0) != self._lane else None


class Part:
    """Keeps part K of N of the tests that markers have chosen, counted from 0."""

    def __init__(self, text: str) -> None:
        self._number, self._num_parts = map(int, text.split("/"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leave out the other parts."""
        kept = choose_part(items, self._number, self._num_parts)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def choose_part(items, number, num_parts):
    """Return the tests of part `number` of `num_parts`.

    Each part takes about as long as the others: `slow(seconds)` and `tools(seconds)` say how long a
    test takes, those without a number a second. Tests that share a fixture stay together: those of
    a file, or, in a file with very many, those with the same parameters, as all tests of a layout.
    Scripts share nothing; Slurm jobs, as other long tests, take much longer than what they share.
    """
    num_by_file = Counter(item.path for item in items)
    groups = {}
    for item in items:
        parameters = getattr(item, "callspec", None)
        is_split = num_by_file[item.path] > MAX_TESTS_TOGETHER or item.get_closest_marker("tools")
        name = parameters.id if parameters and is_split else ""
        if item.get_closest_marker("slurm") or _duration_s([item]) >= ALONE_FROM_S:
            name = item.name
        groups.setdefault((item.path, name), []).append(item)
    load_s, kept = [0] * num_parts, set()
    for group in sorted(groups.values(), key=_duration_s, reverse=True):
        shortest = load_s.index(min(load_s))
        load_s[shortest] += _duration_s(group)
        if shortest == number % num_parts:
            kept.update(group)
    return kept


def _duration_s(items):
    markers = [
        item.get_closest_marker("slow") or item.get_closest_marker("tools") for item in items
    ]
    return sum(marker.args[0] if marker and marker.args else 1 for marker in markers)
