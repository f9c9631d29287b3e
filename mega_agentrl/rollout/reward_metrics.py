"""Numbers about the parts of the reward, named ``reward/what``, means over trajectories.

`reward/<part>`: what it adds, with its weight; only where a reward has several parts.
`reward/<part>/<field>`: what a function of the user's own said beside its number, where that is a
finite number (true is 1, false is 0). `reward/failed`: share whose reward could not be had.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.records import Score, Trajectory


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """All metrics of these trajectories, failed ones included."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in trajectories:
        if one.score is not None and not one.failed:
            for name, value in _numbers(one.score):
                values[name].append(value)
    without = [float(one.no_reward != "") for one in trajectories]
    means = {f"reward/{name}": fmean(values[name]) for name in sorted(values)}
    return {"reward/failed": fmean(without) if without else 0.0, **means}


def _numbers(score: Score) -> Iterator[tuple[str, float]]:
    yield from score.parts.items()
    for part, fields in score.fields.items():
        for name, value in fields.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                yield f"{part}/{name}", float(value)
