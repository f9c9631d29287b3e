"""Files of a sweep (`-m`): one by each job, and a comparison when all jobs have ended.

    <sweep folder>/<number>-<swept values>/  one run, with sweep_job.json
    <sweep folder>/comparison.{md,json,png}  over all runs

A failed job does not end the sweep: it raises `SweepJobFailed`, which the launcher records, the
other jobs run, and Hydra exits with code 1. An interrupt ends the sweep. In either case the process
that started the sweep compares the existing runs. Hydra does not call its callback for the end of a
sweep after a failed job, so the callback only records the folder and the swept keys, and
`write_sweep_reports` writes the comparison. With the submitit launcher that process waits for the
jobs; if it was closed before, `tools/compare_runs.py <sweep folder>` writes the same comparison.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from omegaconf import flag_override

from mega_agentrl.config.sweep_overrides import swept_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig

_SWEPT_KEYS = "hydra.callbacks.sweep.swept_keys"
_pending_sweep_dirs: list[Path] = []
"""Folders of sweeps that this process has started and not finished."""


class SweepJobFailed(CompactHydraException):  # type: ignore[misc]
    """A job of a sweep failed; its message has been printed and saved."""


class SweepCallback(Callback):  # type: ignore[misc]
    """Records the folder and the swept keys of a sweep; set in `configs/train.yaml`."""

    def __init__(self, swept_keys: Sequence[str] = ()) -> None:
        """Create the callback; `hydra.sweep.subdir` reads `swept_keys` from its configuration."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the folder of the sweep that starts, and its swept keys for the jobs.

        Hydra composes a job from the overrides of its own settings and those of the job, so that
        the keys are added to the former.
        """
        _pending_sweep_dirs.append(Path(str(config.hydra.sweep.dir)).resolve())
        keys = swept_keys(config.hydra.overrides.task)
        keys += [str(key).lstrip("+~") for key in config.hydra.sweeper.get("params") or ()]
        with flag_override(config.hydra.overrides.hydra, "readonly", False):
            config.hydra.overrides.hydra.append(f"{_SWEPT_KEYS}=[{','.join(keys)}]")


def write_job_file(run_dir: Path, overrides: Sequence[str], failed: str = "") -> None:
    """Write the overrides of a job, and why it failed if it did."""
    # `report` is slow to import, and this module is imported at the start of every process.
    from mega_agentrl.report.compare.run_result import JOB_FILE

    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"overrides": list(overrides), "failed": failed}
    (run_dir / JOB_FILE).write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")


def write_sweep_reports() -> None:
    """Write and print the comparison of each sweep that has ended."""
    while _pending_sweep_dirs:
        folder = _pending_sweep_dirs.pop()
        try:
            print(compare_run_dirs(_job_dirs(folder), folder))
        except (ValueError, OSError) as error:
            print(f"mega_agentrl: no comparison of the sweep: {error}", file=sys.stderr)
        else:
            print(f"comparison of the sweep: {folder / 'comparison.md'}")


def _job_dirs(folder: Path) -> list[Path]:
    """Return the jobs of a sweep; the folder itself, where no run is, if none has started."""
    from mega_agentrl.report.compare.run_result import find_job_dirs

    return find_job_dirs(folder) or [folder]


def compare_run_dirs(folders: Sequence[Path], out: Path) -> str:
    """Compare runs, and the runs of sweeps; write into `out` and return the table.

    Raises:
        ValueError: A folder contains no run.
    """
    from mega_agentrl.report.compare.run_result import find_run_dirs, read_run_result
    from mega_agentrl.report.compare.sweep_table import write_sweep_report

    paths = dict.fromkeys(path for folder in folders for path in find_run_dirs(folder))
    return write_sweep_report(out, [read_run_result(path) for path in paths])
