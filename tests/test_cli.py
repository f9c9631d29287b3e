"""Messages and exit codes of interrupted and failed runs; `e2e/` has whole runs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mega_agentrl import __main__, cli
from mega_agentrl.cli import EXIT_FAILED, EXIT_RESTART, describe_failure, describe_interruption
from mega_agentrl.config.override_keys import parse_command_line
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.runtime.remote_calls import ModelRankDiedError, ProcessDiedError
from mega_agentrl.train.output.report_page import FAILED_TIMEOUT_S, INTERRUPTED_TIMEOUT_S
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.signals import EXIT_CODES, RunInterrupted, SignalHandler
from mega_agentrl.types.errors import FirstCallsFailedError
from tests.train.file_policy import FilePolicy

LIMIT_S = 120


def catches(pid, number):
    """Return whether a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@pytest.mark.parametrize("number", EXIT_CODES)
def test_signal_during_imports_ends_the_process_cleanly(number, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-m", "mega_agentrl", "experiment=smoke_ci", f"run_dir={tmp_path}/run"],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end_s = time.monotonic() + LIMIT_S
        # Python itself handles SIGINT, but none of the others.
        while not all(catches(child.pid, one) for one in EXIT_CODES) and time.monotonic() < end_s:
            time.sleep(0.005)
        os.kill(child.pid, number)
        output, _ = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert child.returncode == EXIT_CODES[number], output
    assert signal.Signals(number).name in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_signal_between_two_handlers_ends_the_process_cleanly(monkeypatch, capsys):
    handler = SignalHandler()
    monkeypatch.setattr(handler, "install", lambda: handler.on_signal(signal.SIGTERM))
    monkeypatch.setattr(__main__, "PROCESS_SIGNAL_HANDLER", handler)
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == EXIT_CODES[signal.SIGTERM]
    assert "SIGTERM" in capsys.readouterr().err


def test_a_refused_command_leaves_no_run_folder(tmp_path):
    arguments = ["experiment=smoke_ci", "data.train=missing.jsonl", f"run_dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "mega_agentrl", *arguments],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2 and "data.train" in done.stderr
    assert list(tmp_path.iterdir()) == []


SETTINGS = {"run_dir": "runs/default", "resume": True}


@pytest.mark.parametrize(
    ("arguments", "created"),
    [
        (["seed=2"], ["runs/default"]),
        (["hydra.run.dir=elsewhere"], ["elsewhere"]),
        (["-m", "seed=1,2", "hydra.sweep.dir=elsewhere"], ["elsewhere"]),
        (["-m", "seed=1,2", "hydra.run.dir=elsewhere"], ["runs/default"]),
        (["hydra.run.dir=at-${now:%H}"], []),
    ],
    ids=["run_dir", "hydra_run_dir", "hydra_sweep_dir", "sweep_with_run_dir", "interpolation"],
)
def test_only_the_folder_that_the_run_gets_is_created(tmp_path, monkeypatch, arguments, created):
    monkeypatch.chdir(tmp_path)
    cli._check_run_dir(parse_command_line(arguments), OmegaConf.create(SETTINGS))
    folders = [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert [str(path.relative_to(tmp_path)) for path in folders] == created


def test_a_sweep_after_a_run_of_the_same_experiment_moves_it_aside(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        path = tmp_path / "runs" / "default" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    cli._check_run_dir(parse_command_line(["-m", "seed=1,2"]), OmegaConf.create(SETTINGS))
    assert (tmp_path / "runs" / "default.1" / "summary.json").exists()
    assert list((tmp_path / "runs" / "default").iterdir()) == []
    assert "runs/default.1" in capsys.readouterr().out


def test_steps_that_epochs_amount_to_are_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(cli, "check_config", checked.append)
    config = TrainConfig(total_epochs=3)
    found = cli._set_total_steps(config, 78)
    assert (found.total_steps, found.total_epochs, config.total_steps) == (78, 3, 100)
    assert [(one.total_steps, one.total_epochs) for one in checked] == [(78, 0)]


def test_messages_and_warnings_go_to_the_file_of_the_driver(tmp_path):
    script = f"""
import logging, pathlib, warnings
from mega_agentrl import cli
cli._set_up_file_logging(pathlib.Path({str(tmp_path)!r}))
logging.getLogger("some.library").info("loaded")
for library in ("httpx", "openai._base_client", "mcp.server.lowlevel.server"):
    logging.getLogger(library).info("HTTP Request: POST")
    logging.getLogger(library).warning("%s retries", library)
logging.getLogger("mega_agentrl.agent_output").info("p0/3/0, exit code 0, end of stdout: step 3")
warnings.warn("old option")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=LIMIT_S, capture_output=True, text=True, check=True
    )
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "some.library INFO loaded" in text and "old option" in text
    assert "HTTP Request" not in text and "httpx retries" in text  # one line per request is noise
    assert "step 3" in (tmp_path / "logs" / "agents.log").read_text() and "step 3" not in text
    assert not ended.stderr


def test_interruption_message_names_the_checkpoint(tmp_path):
    signal_handler = SignalHandler()
    message = describe_interruption(tmp_path, signal_handler)
    assert "checkpoints/" not in message and "/metrics.jsonl" not in message
    with pytest.raises(RunInterrupted):
        signal_handler.on_signal(signal.SIGUSR1)
    (tmp_path / "metrics.jsonl").touch()
    for step in (2, 4):
        run_state.save_checkpoint(FilePolicy(), tmp_path, RunState(step=step, sampler_state={}))
    message = describe_interruption(tmp_path, signal_handler)
    for fact in ("SIGUSR1", "RL step 4", "/checkpoints/step-000004", "/metrics.jsonl"):
        assert fact in message


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Run the training with fakes; `ends` replaces the training, `order` records events."""
    order = []

    @contextmanager
    def build(config, inputs, cluster):
        try:
            yield None
        finally:
            order.append("closed")

    def page(run_dir, *, deadline_s, failure):
        order.append(("page", run_dir, deadline_s, failure))

    signal_handler = SignalHandler()
    monkeypatch.setattr(cli, "PROCESS_SIGNAL_HANDLER", signal_handler)
    monkeypatch.setattr(signal_handler, "install", lambda: None)
    monkeypatch.setattr(cli, "_in_sweep", lambda: False)
    monkeypatch.setattr("mega_agentrl.train.output.report_page.write_interrupted_report", page)

    def start(ends, build=build):
        monkeypatch.setattr("mega_agentrl.runtime.build.build", build)
        monkeypatch.setattr(
            "mega_agentrl.train.trainer.train_with_restarts",
            lambda *_: ends(signal_handler),
        )
        return cli._train(TrainConfig(run_dir=str(tmp_path)), None, tmp_path, None)

    return start, order


def raises(error):
    raise error


READS_INPUTS = """
import time
from pathlib import Path
from mega_agentrl import cli
from mega_agentrl.config.override_keys import parse_command_line
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.runtime import inputs
from mega_agentrl.runtime.cluster import ClusterConnection

def wait(config, begin):
    try:
        print("ready", flush=True)
        time.sleep(600)
    except BaseException:
        time.sleep(600)

inputs.read_inputs = wait
cli.PROCESS_SIGNAL_HANDLER.install()
config = TrainConfig()
cli._read_inputs(config, Path(), ClusterConnection(config))
"""


@pytest.mark.slow(20)
def test_a_signal_ends_a_run_that_waits_in_a_library_while_it_reads_inputs():
    child = subprocess.Popen([sys.executable, "-c", READS_INPUTS], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT_S) == EXIT_CODES[signal.SIGTERM]
    finally:
        child.kill()


def test_help_ends_quietly_if_nobody_reads_on():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        left = subprocess.run(
            [sys.executable, "-m", "mega_agentrl", "--help"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            timeout=LIMIT_S,
        )
    assert (left.returncode, left.stderr) == (0, b"")


@pytest.mark.parametrize("number", EXIT_CODES)
def test_interrupted_run_writes_its_report_last(started, tmp_path, number, capsys):
    start, order = started
    with pytest.raises(SystemExit) as left:
        start(lambda signal_handler: signal_handler.on_signal(number))
    assert left.value.code == EXIT_CODES[number]
    assert order == ["closed", ("page", tmp_path, INTERRUPTED_TIMEOUT_S, "")]
    assert signal.Signals(number).name in capsys.readouterr().err


def test_second_signal_skips_the_report(started):
    start, order = started

    def twice(signal_handler):
        with pytest.raises(RunInterrupted):
            signal_handler.on_signal(signal.SIGTERM)
        signal_handler.on_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        start(twice)
    assert (left.value.code, order) == (EXIT_CODES[signal.SIGTERM], ["closed"])


STOPPED = FirstCallsFailedError(
    name="tool notes", source="notes.py", num_calls=8, error="KeyError: 'a'", location="notes.py:3"
)


@pytest.mark.parametrize(
    "error",
    [ValueError("bug"), RuntimeError("bug"), KeyError("bug"), STOPPED],
    ids=["value", "runtime", "unexpected", "stopped"],
)
def test_failed_run_writes_its_report_and_keeps_the_error(started, tmp_path, error):
    start, order = started
    expected = KeyError if isinstance(error, KeyError) else SystemExit
    with pytest.raises(expected) as left:
        start(lambda _: raises(error))
    message = "" if isinstance(error, KeyError) else str(error)
    assert order == ["closed", ("page", tmp_path, FAILED_TIMEOUT_S, message)]
    assert left.value is error or (left.value.code, left.value.__context__) == (1, error)


def test_finished_or_unbuilt_run_writes_no_interrupted_report(started):
    start, order = started
    assert start(lambda _: 0.5) == 0.5
    assert order == ["closed"]
    with pytest.raises(SystemExit) as left:
        start(lambda _: 0.5, build=lambda *_: raises(ValueError("no such model")))
    assert (left.value.code, order) == (2, ["closed"])


def test_lost_critic_restarts_the_job_only_with_a_checkpoint(tmp_path):
    lost = ModelRankDiedError("critic update: critic rank 1 died", "critic rank 1")
    assert describe_failure(lost, tmp_path) == (str(lost), EXIT_FAILED)
    run_state.save_checkpoint(FilePolicy(), tmp_path, RunState(step=2, sampler_state={}))
    message, code = describe_failure(lost, tmp_path)
    assert code == EXIT_RESTART == EXIT_CODES[signal.SIGUSR1]
    assert str(lost) in message and f"{tmp_path}/checkpoints/step-000002" in message
    for other in (ProcessDiedError("engine 0 died", "engine 0"), ValueError("optim.lr=-1")):
        assert describe_failure(other, tmp_path) == (str(other), EXIT_FAILED)


def test_stopped_run_has_code_1_and_names_its_checkpoint(tmp_path):
    assert describe_failure(STOPPED, tmp_path) == (str(STOPPED), EXIT_FAILED)
    run_state.save_checkpoint(FilePolicy(), tmp_path, RunState(step=2, sampler_state={}))
    message, code = describe_failure(STOPPED, tmp_path)
    assert code == EXIT_FAILED
    for piece in ("tool notes", "notes.py:3", "KeyError: 'a'", "step-000002"):
        assert piece in message
