"""Input of runs of a user, and the overrides that point a run at it."""

import subprocess
import sys

from tests.e2e.conftest import ROOT


def make_task(task, folder, *sizes):
    """Write model and data of a generated task with `tools/make_tiny_model.py`."""
    script = [str(ROOT / "tools" / "make_tiny_model.py"), "--task", task, "--out", str(folder)]
    subprocess.run([sys.executable, *script, *sizes], check=True, timeout=240, capture_output=True)


def task_overrides(folder, run_dir):
    """Return the overrides for model and data of a folder."""
    return [
        f"run_dir={run_dir}",
        f"model.path={folder}/model",
        f"data.train={folder}/train.parquet",
        f"data.validation={folder}/validation.parquet",
        f"sft.train_data={folder}/demonstrations.parquet",
        f"sft.dev_data={folder}/dev.parquet",
    ]


def asset_overrides(assets, run_dir):
    """Return the overrides for the small tool-QA of `tests/conftest.py`."""
    return [*task_overrides(assets, run_dir), f"tool.search.source={assets}/corpus.jsonl"]
