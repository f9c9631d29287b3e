"""Metrics of the parts of the reward, named ``reward/...``, as means over valid trajectories.

`reward/<part>`: weighted contribution of a part; only for rewards with several parts.
`reward/<part>/<field>`: finite number (or bool) that a user's reward function returned in addition.
`reward/failed_fraction`: share of all trajectories whose reward could not be computed.
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
    """Return the reward metrics of all trajectories, including failed ones."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in trajectories:
        if one.score is not None and not one.failed:
            for name, value in _score_values(one.score):
                values[name].append(value)
    missing = [float(one.reward_error != "") for one in trajectories]
    means = {f"reward/{name}": fmean(values[name]) for name in sorted(values)}
    return {"reward/failed_fraction": fmean(missing) if missing else 0.0, **means}


def _score_values(score: Score) -> Iterator[tuple[str, float]]:
    yield from score.parts.items()
    for part, fields in score.extra_info.items():
        for name, value in fields.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                yield f"{part}/{name}", float(value)
