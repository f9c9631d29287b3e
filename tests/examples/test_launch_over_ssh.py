"""`examples/launch_over_ssh.sh` with programs that record their calls, not `ssh` and `ray`."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "launch_over_ssh.sh"
PROGRAMS = {
    "ssh": 'export ON_HOST=$1; shift; exec "$@"',
    "ray": 'echo "$ON_HOST ray $*" >>"$CALLS"; echo "$RAY_AUTH_TOKEN" >>"$CALLS.tokens"\n'
    '[ "$ON_HOST $1" != "${FAILS:-}" ]',
    "python": 'echo "driver $*" >>"$CALLS"; echo "$RAY_AUTH_TOKEN" >>"$CALLS.tokens"\n'
    "trap 'exit 75' USR1; trap 'exit 143' TERM; touch \"$CALLS.ready\"\n"
    'while [ -n "${HOLDS:-}" ]; do sleep 0.05; done; exit "${DRIVER_EXIT:-0}"',
}


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script in a repository whose programs only record."""
    root, programs = tmp_path / "the root", tmp_path / "programs"
    (root / "slurm").mkdir(parents=True)
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    # The script must not reach the Ray of this environment, which `ray stop` would end.
    path = f"{programs}:/usr/bin:/bin"
    (root / "slurm" / "env.sh").write_text(f"export PATH={path}\n")
    children = []

    def run(*overrides, **more):
        environment = {"PATH": path, "CALLS": str(tmp_path / "calls"), "HOSTS": "n1 n2 n3", **more}
        children.append(
            subprocess.Popen(["/bin/bash", SCRIPT, *overrides], cwd=root, env=environment)
        )
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.wait()


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


STOPS = [f"{host} ray stop" for host in ("n1", "n2", "n3")]


def test_ray_runs_on_all_hosts_before_the_driver_and_not_after_it(start, tmp_path):
    code = start("experiment=smoke", "run_dir=my runs/a", RAY_PORT="7000", DRIVER_EXIT="3").wait(
        300
    )
    assert code == 3
    head, *others, driver, _, _, _ = calls(tmp_path)
    assert head.startswith("n1 ray start --head --port=7000 ")
    assert [call.rpartition(" ")[0] for call in others] == [
        f"{host} ray start --address=n1:7000" for host in ("n2", "n3")
    ]
    overrides = "experiment=smoke run_dir=my runs/a cluster.ray_address=n1:7000"
    assert driver == f"driver -m mega_agentrl {overrides}"
    assert calls(tmp_path)[-3:] == STOPS
    (token,) = set((tmp_path / "calls.tokens").read_text().split())
    assert len(token) == 64


def test_without_ray_on_a_host_there_is_no_driver(start, tmp_path):
    assert start("experiment=smoke", FAILS="n2 start").wait(300) != 0
    assert not any(call.startswith("driver") for call in calls(tmp_path))
    assert calls(tmp_path)[-3:] == STOPS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_signals_reach_the_driver_which_chooses_the_exit_code(start, tmp_path, number, code):
    child = start("experiment=smoke", HOLDS="yes")
    deadline_s = time.monotonic() + 300
    while not (tmp_path / "calls.ready").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    os.kill(child.pid, number)
    assert child.wait(300) == code
    assert calls(tmp_path)[-3:] == STOPS


def test_without_hosts_nothing_is_started(start, tmp_path):
    assert start("experiment=smoke", HOSTS="").wait(300) != 0
    assert not (tmp_path / "calls").exists()
