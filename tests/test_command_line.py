"""What an interrupted run says and exits with; whole runs are in `e2e/`."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mega_agentrl import command_line
from mega_agentrl.command_line import FAILED, START_AGAIN, farewell, verdict
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.runtime.remote import DiedError, ModelGoneError
from mega_agentrl.train import run_state
from mega_agentrl.train.last_page import FAILED_S, STOPPED_S
from mega_agentrl.train.run_state import RunState
from mega_agentrl.train.stopping import CODES, Stopped, Stopper
from tests.train.file_policy import FilePolicy

LIMIT_S = 120


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
        # Python itself has one for SIGINT, but none for the others.
        while not all(catches(child.pid, one) for one in CODES) and time.monotonic() < end_s:
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


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Trains with fakes; `ends` is what training does, `order` what happened."""
    order = []

    @contextmanager
    def build(config, inputs):
        try:
            yield None
        finally:
            order.append("closed")

    def page(run_dir, *, deadline_s):
        order.append(("page", run_dir, deadline_s))

    stopper = Stopper()
    monkeypatch.setattr(command_line, "PROCESS", stopper)
    monkeypatch.setattr(stopper, "listen", lambda: None)
    monkeypatch.setattr(command_line, "_in_sweep", lambda: False)
    monkeypatch.setattr("mega_agentrl.train.last_page.write_last_page", page)

    def start(ends, build=build):
        monkeypatch.setattr("mega_agentrl.runtime.build.build", build)
        monkeypatch.setattr("mega_agentrl.train.restart.train_to_the_end", lambda *_: ends(stopper))
        return command_line._train(TrainConfig(run_dir=str(tmp_path)), None, tmp_path)

    return start, order


def raises(error):
    raise error


@pytest.mark.parametrize("number", CODES)
def test_a_run_that_is_stopped_leaves_its_page_last_of_all(started, tmp_path, number, capsys):
    start, order = started
    with pytest.raises(SystemExit) as left:
        start(lambda stopper: stopper.on_signal(number))
    assert left.value.code == CODES[number]
    assert order == ["closed", ("page", tmp_path, STOPPED_S)]
    assert f"interrupted ({signal.Signals(number).name})" in capsys.readouterr().err


def test_whoever_asks_twice_does_not_wait_for_a_page(started):
    start, order = started

    def twice(stopper):
        with pytest.raises(Stopped):
            stopper.on_signal(signal.SIGTERM)
        stopper.on_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        start(twice)
    assert (left.value.code, order) == (CODES[signal.SIGTERM], ["closed"])


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ours"), KeyError("ours")])
def test_a_run_that_fails_leaves_its_page_and_its_error(started, tmp_path, error):
    start, order = started
    expected = KeyError if isinstance(error, KeyError) else SystemExit
    with pytest.raises(expected) as left:
        start(lambda _: raises(error))
    assert order == ["closed", ("page", tmp_path, FAILED_S)]
    assert left.value is error or (left.value.code, left.value.__context__) == (1, error)


def test_a_run_that_ends_by_itself_or_never_began_has_no_page_of_this_kind(started):
    start, order = started
    assert start(lambda _: 0.5) == 0.5
    assert order == ["closed"]
    with pytest.raises(SystemExit) as left:
        start(lambda _: 0.5, build=lambda config, inputs: raises(ValueError("no such model")))
    assert (left.value.code, order) == (2, ["closed"])


def test_a_lost_critic_lets_the_job_start_again_only_where_there_is_a_checkpoint(tmp_path):
    lost = ModelGoneError("critic update: critic rank 1 died", "critic rank 1")
    assert verdict(lost, tmp_path) == (str(lost), FAILED)
    run_state.save(FilePolicy(), tmp_path, RunState(step=2, controllers={}, sampler={}))
    said, code = verdict(lost, tmp_path)
    assert code == START_AGAIN == CODES[signal.SIGUSR1]
    assert said.startswith("critic update: critic rank 1 died\n")
    assert f"the same command goes on from {tmp_path}/checkpoints/step-000002." in said
    for other in (DiedError("engine 0 died", "engine 0"), ValueError("optim.lr=-1")):
        assert verdict(other, tmp_path) == (str(other), FAILED)
