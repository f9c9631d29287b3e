"""A Hydra sweep through the submitit launcher: an array of jobs, one a run."""

import json
import subprocess
import sys

import pytest

from tests.e2e.overrides import asset_overrides
from tests.slurm.conftest import ROOT

pytestmark = pytest.mark.slurm


def test_a_sweep_is_an_array_of_jobs(jobs, assets):
    words = [
        "-m",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=10",
        "experiment=smoke_ci",
        "parallel=single",
        "total_steps=0",
        "sft.max_steps=0",
        "evaluate.num_questions=2",
        "seed=1,2",
        *asset_overrides(assets, jobs.run_dir),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mega_agentrl", *words],
        cwd=ROOT,
        env={**jobs.slurm.environment, "MEGA_AGENTRL_LOCAL_DIR": jobs.marker},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = sorted(path.parent.name for path in jobs.run_dir.glob("*/summary.json"))
    assert len(runs) == 2, list(jobs.run_dir.iterdir())
    seeds = [
        json.loads((jobs.run_dir / name / "summary.json").read_text())["seed"] for name in runs
    ]
    assert seeds == [1, 2]
    tasks = {path.name for path in (jobs.run_dir / ".submitit").glob("[0-9]*_[0-9]*")}
    (array,) = {name.split("_")[0] for name in tasks}
    assert tasks == {f"{array}_0", f"{array}_1"}
