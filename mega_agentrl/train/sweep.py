"""A sweep (`-m`): what each job leaves in its folder, and the table when all have ended.

    <sweep folder>/<number>-<overrides>/     one run, with sweep_job.json
    <sweep folder>/comparison.{md,json,png}  over all of them

A job that fails does not end the sweep: it raises `JobFailed`, which the launcher keeps, the others
run, and Hydra ends with exit code 1. An interrupt does end it. Either way the table is written of
what there is, by the process that started the sweep: Hydra's callback at a sweep's end is not
called after a failed job, so the callback only notes the folder, and `finish` makes the table.
With the submitit launcher that process waits for the jobs; where it was closed before,
`tools/compare_runs.py <sweep folder>` makes the same table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig

_started: list[Path] = []
"""Folders of the sweeps that this process has started and not finished."""


class JobFailed(CompactHydraException):  # type: ignore[misc]
    """A job of a sweep that failed; its message has been printed and kept."""


class SweepStart(Callback):  # type: ignore[misc]
    """Notes the folder of a sweep; named in `configs/train.yaml`."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `hydra.experimental.callback.Callback`."""
        _started.append(Path(str(config.hydra.sweep.dir)).resolve())


def note_job(run_dir: Path, overrides: Sequence[str], failed: str = "") -> None:
    """Write what a job is, and why it failed where it did."""
    # Here as the report's modules take a while to import, and this one is imported first of all.
    from mega_agentrl.report.run_result import JOB_FILE

    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"overrides": list(overrides), "failed": failed}
    (run_dir / JOB_FILE).write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")


def finish() -> None:
    """Write and print the table of a sweep that has ended; nothing where there was none."""
    while _started:
        folder = _started.pop()
        try:
            print(compare_folders([folder], folder))
        except (ValueError, OSError) as error:
            print(f"mega_agentrl: no comparison of the sweep: {error}", file=sys.stderr)
        else:
            print(f"comparison of the sweep: {folder / 'comparison.md'}")


def compare_folders(folders: Sequence[Path], out: Path) -> str:
    """Compare runs, and those of sweeps; writes into `out` and returns the table.

    Raises `ValueError` for a folder without runs.
    """
    from mega_agentrl.report.run_result import read_run, runs_below
    from mega_agentrl.report.sweep_table import write_sweep

    paths = dict.fromkeys(path for folder in folders for path in runs_below(folder))
    return write_sweep(out, [read_run(path) for path in paths])
