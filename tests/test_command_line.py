"""What an interrupted run says and exits with; whole runs are in `e2e/`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega_agentrl.command_line import farewell
from mega_agentrl.train import run_state
from mega_agentrl.train.run_state import RunState
from mega_agentrl.train.stopping import CODES, Stopped, Stopper
from tests.train.file_policy import FilePolicy

LIMIT_S = 60


def catches(pid, number):
    """Whether a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@pytest.mark.parametrize("number", CODES)
def test_a_signal_that_comes_while_modules_are_imported_ends_it_in_order(number, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-m", "mega_agentrl", "experiment=smoke_ci", f"run_dir={tmp_path}/run"],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end_s = time.monotonic() + LIMIT_S
        # Python itself has one for SIGINT, but none for USR1.
        while not catches(child.pid, signal.SIGUSR1) and time.monotonic() < end_s:
            time.sleep(0.005)
        os.kill(child.pid, number)
        output, _ = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert child.returncode == CODES[number], output
    assert f"interrupted ({signal.Signals(number).name})" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_the_farewell_says_what_is_saved_and_how_to_go_on(tmp_path):
    stopper = Stopper()
    assert "There is no checkpoint to resume from" in farewell(tmp_path, stopper)
    with pytest.raises(Stopped):
        stopper.on_signal(signal.SIGUSR1)
    for step in (2, 4):
        state = RunState(step=step, controllers={}, sampler={})
        run_state.save(FilePolicy(), tmp_path, state)
    said = farewell(tmp_path, stopper)
    assert said.startswith("interrupted (SIGUSR1); every process was ended.")
    assert f"goes on after RL step 4, from {tmp_path}/checkpoints/step-000004." in said
    assert f"{tmp_path}/metrics.jsonl" in said
