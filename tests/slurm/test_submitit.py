"""A Hydra sweep through the submitit launcher: a job array with one job per run."""

import json
import subprocess
import sys

import pytest

from tests.e2e.overrides import asset_overrides
from tests.slurm.conftest import ROOT

pytestmark = pytest.mark.slurm


def sweep(jobs, assets, *words):
    """Run a sweep over seeds 1 and 2; return the command's result and run folders by seed."""
    words = [
        "-m",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=10",
        "experiment=smoke_ci",
        "parallel=single",
        "seed=1,2",
        *asset_overrides(assets, jobs.run_dir),
        *words,
    ]
    completed = subprocess.run(
        [sys.executable, "-m", "mega_agentrl", *words],
        cwd=ROOT,
        env={**jobs.slurm.environment, "MEGA_AGENTRL_LOCAL_DIR": jobs.marker},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    folders = {}
    for path in sorted(jobs.run_dir.glob("*/sweep_job.json")):
        (seed,) = [
            word.removeprefix("seed=")
            for word in json.loads(path.read_text())["overrides"]
            if word.startswith("seed=")
        ]
        folders[int(seed)] = path.parent
    tasks = {path.name for path in (jobs.run_dir / ".submitit").glob("[0-9]*_[0-9]*")}
    (array,) = {name.split("_")[0] for name in tasks}
    assert tasks == {f"{array}_0", f"{array}_1"}
    return completed, folders


def test_sweep_is_a_job_array_with_an_error_per_job(jobs, assets):
    missing = jobs.folder / "missing.parquet"
    completed, folders = sweep(jobs, assets, f"data.train={missing}")
    assert completed.returncode == 1, completed.stdout[-3000:] + completed.stderr[-3000:]
    assert sorted(folders) == [1, 2]
    # The command may end at the first failure, while the other job still runs.
    jobs.slurm.wait_for(lambda: not jobs.slurm.command("squeue", "-h").stdout.strip(), 480, "end")
    for folder in folders.values():
        assert str(missing) in json.loads((folder / "sweep_job.json").read_text())["failed"]


@pytest.mark.slow(60)
def test_every_job_of_a_sweep_trains(jobs, assets):
    words = ["total_steps=0", "sft.max_steps=0", "evaluate.num_questions=2"]
    completed, folders = sweep(jobs, assets, *words)
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    for seed, folder in folders.items():
        assert json.loads((folder / "summary.json").read_text())["seed"] == seed
    assert sorted(folders) == [1, 2]
