"""Mean advantages of a step's trajectories, in a file beside its trees.

Trees record what was sampled; the advantages are computed later and stored apart, in
``step_000020.advantages.json``: an object from trajectory id to the mean advantage of its trained
tokens. Trajectories without a trained token are left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

ADVANTAGES_SUFFIX = ".advantages.json"


def mean_advantages(trees: Sequence[RolloutTree], batch: TrainBatch) -> dict[str, float]:
    """Return the mean advantage by trajectory id; `batch` is packed from `trees`.

    Raises:
        ValueError: The batch has no advantages, or rows of other trajectories.
    """
    trajectory_ids = [one.trajectory_id for tree in trees for one in tree.trajectories]
    owners = (
        list(range(batch.num_rows)) if batch.trajectory_B is None else batch.trajectory_B.tolist()
    )
    if batch.advantage_BT is None or not set(owners) <= set(range(len(trajectory_ids))):
        got = "no advantages" if batch.advantage_BT is None else f"rows of {1 + max(owners)}"
        raise ValueError(
            f"advantages of a step: got {got}, expected a batch with advantages packed from these "
            f"{len(trajectory_ids)} trajectories"
        )
    sums, counts = [0.0] * len(trajectory_ids), [0] * len(trajectory_ids)
    total_B = batch.advantage_BT.masked_fill(~batch.mask_BT, 0.0).double().sum(dim=1)
    for owner, total, count in zip(
        owners, total_B.tolist(), batch.mask_BT.sum(dim=1).tolist(), strict=True
    ):
        sums[owner] += total
        counts[owner] += count
    return {
        name: total / count
        for name, total, count in zip(trajectory_ids, sums, counts, strict=True)
        if count
    }


def write_advantages(trees_file: Path, advantages: dict[str, float]) -> None:
    """Write the advantages beside a file of trees, atomically."""
    path = trees_file.with_suffix(ADVANTAGES_SUFFIX)
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(advantages) + "\n", encoding="utf-8")
    partial.replace(path)


def read_advantages(trees_file: Path) -> dict[str, float]:
    """Read the advantages beside a file of trees; empty if there are none.

    Raises:
        ValueError: The file contains something else.
    """
    path = trees_file.with_suffix(ADVANTAGES_SUFFIX)
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected numbers by trajectory id ({error})") from None
