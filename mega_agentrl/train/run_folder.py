"""The folder of a run starts empty; what an earlier run left there is kept beside it."""

from __future__ import annotations

import itertools
from pathlib import Path


def make_room(run_dir: Path) -> Path | None:
    """Make `run_dir`, new and empty; returns where an earlier run of it went, if there was one.

    A folder that holds metrics of a run is renamed to the first free of `<name>.1`,
    `<name>.2`, ...; anything else in place stays as it is.
    """
    moved = None
    if (run_dir / "metrics.jsonl").exists():
        numbered = (run_dir.with_name(f"{run_dir.name}.{k}") for k in itertools.count(1))
        moved = next(path for path in numbered if not path.exists())
        run_dir.rename(moved)
    run_dir.mkdir(parents=True, exist_ok=True)
    return moved
