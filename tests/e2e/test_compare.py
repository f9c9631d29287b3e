"""The comparison with real processes: killed in the middle of a run, then gone on with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.overrides import asset_overrides
from tests.train.metric_lines import metric_lines

ROOT = Path(__file__).parents[2]
SMALL = (
    "sft.max_steps=20",
    "data.prompts_per_step=4",
    "evaluate.num_questions=8",
    "evaluate.num_samples=1",
)


@pytest.mark.slow(60)
@pytest.mark.parametrize("algorithm", ["arpo", "ppo"])
def test_a_killed_comparison_continues_from_its_checkpoint(algorithm, assets, tmp_path):
    out = tmp_path / "out"
    given = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir")]
    choice = ("--tasks", "toolqa", "--algos", algorithm, "--seeds", "3", "--rates", "2e-4")
    choice += ("--steps", "6", "--marks", "3")
    command = [sys.executable, "-u", str(ROOT / "tools" / "compare_algos.py"), *choice]
    command += ["--save-every", "2", "--out", str(out), *given, *SMALL]
    run = out / "toolqa" / "runs" / f"{algorithm}-lr0.0002-seed3"
    # A session of its own, so that everything it started is killed with it, as a host would be.
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        ends_at = time.monotonic() + 600
        while not (run / "checkpoints" / "step-000002" / "manifest.json").is_file():
            assert first.poll() is None, "ended before it could be killed"
            assert time.monotonic() < ends_at
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):  # it has failed before
            os.killpg(first.pid, signal.SIGKILL)
        first.wait(120)
    assert not (run / "result.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(rf"{algorithm}-lr0.0002-seed3: continuing after step [24]", done.stdout)
    assert [line["step"] for line in metric_lines(run)] == [1, 2, 3, 4, 5, 6]
    points = json.loads((run / "result.json").read_text())["evaluations"]
    spent = [point["num_tokens"] for point in points]
    assert spent[0] == 0 < spent[1] < spent[2] < spent[3]
    assert len(metric_lines(out / "toolqa" / "warm")) == 20, "the warm start was made again"
    assert len(list((run / "checkpoints").iterdir())) == 2
