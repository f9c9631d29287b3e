"""The advantages of a step's trajectories, in a file beside its trees.

Trees are records of what was sampled; what an algorithm made of them is known later and lies
apart: ``step_000020.advantages.json``, an object from trajectory id to the mean advantage of the
tokens it was trained on. A trajectory without such a token is not in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

SUFFIX = ".advantages.json"


def mean_advantages(trees: Sequence[RolloutTree], batch: TrainBatch) -> dict[str, float]:
    """By trajectory id, of a batch that `batch.pack` made of these trees.

    Raises `ValueError` for a batch without advantages, and for one of other trajectories.
    """
    everyone = [one.trajectory_id for tree in trees for one in tree.trajectories]
    owners = list(range(batch.num_rows)) if batch.owner_B is None else batch.owner_B.tolist()
    if batch.advantage_BT is None or not set(owners) <= set(range(len(everyone))):
        got = "no advantages" if batch.advantage_BT is None else f"rows of {1 + max(owners)}"
        raise ValueError(
            f"advantages of a step: got {got}, expected a batch with advantages packed from these "
            f"{len(everyone)} trajectories"
        )
    sums, counts = [0.0] * len(everyone), [0] * len(everyone)
    total_B = batch.advantage_BT.masked_fill(~batch.mask_BT, 0.0).double().sum(dim=1)
    for owner, total, count in zip(
        owners, total_B.tolist(), batch.mask_BT.sum(dim=1).tolist(), strict=True
    ):
        sums[owner] += total
        counts[owner] += count
    return {
        name: total / count
        for name, total, count in zip(everyone, sums, counts, strict=True)
        if count
    }


def write_advantages(trees_file: Path, advantages: dict[str, float]) -> None:
    """Write them beside a file of trees; it appears when it is whole."""
    path = trees_file.with_suffix(SUFFIX)
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(advantages) + "\n", encoding="utf-8")
    partial.replace(path)


def read_advantages(trees_file: Path) -> dict[str, float]:
    """Those beside a file of trees; empty where there are none.

    Raises `ValueError` for a file that is something else.
    """
    path = trees_file.with_suffix(SUFFIX)
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected numbers by trajectory id ({error})") from None
