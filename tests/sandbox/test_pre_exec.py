"""`pre_exec` as a program: another user, folders behind closed ones, and what it refuses."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mega_agentrl.sandbox import pre_exec
from mega_agentrl.sandbox.pre_exec import EXIT_SETUP_FAILED
from mega_agentrl.sandbox.uid_lease import needs_dedicated_uid

needs_root = pytest.mark.skipif(not needs_dedicated_uid(), reason="only root switches users")


def run(*prefix, **job):
    """`pre_exec` with this request, behind the command `prefix`."""
    job = {"cgroups": [], "user": None, "folders": []} | job
    job = {"owned": [False] * len(job["folders"])} | job
    command = [*prefix, sys.executable, "-I", "-S", pre_exec.__file__, json.dumps(job)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_without_a_user_it_only_runs_the_command():
    done = run(folders=["/usr"], command=["/bin/echo", "{0}", "{}", "{1x}"])
    assert (done.returncode, done.stdout) == (0, "/usr {} {1x}\n")


def test_the_process_joins_its_groups_before_it_runs(tmp_path):
    procs_file = tmp_path / "procs"
    done = run(cgroups=[str(procs_file)], command=["/bin/sh", "-c", "echo $$"])
    assert procs_file.read_text(encoding="ascii") == done.stdout.strip()


@needs_root
def test_another_user_reaches_what_lies_behind_a_closed_folder():
    with tempfile.TemporaryDirectory() as closed:  # made with mode 0700
        inside = Path(closed, "inside")
        inside.mkdir(mode=0o755)
        (inside / "note").write_text("hello", encoding="ascii")
        (inside / "note").chmod(0o644)
        script = 'id -u; id -G; cat "$1/note"'
        done = run(user=60800, folders=[str(inside)], command=["/bin/sh", "-c", script, "x", "{0}"])
    assert done.stdout == "60800\n60800\nhello", done.stderr


@needs_root
def test_a_folder_closed_itself_is_named():
    with tempfile.TemporaryDirectory() as closed:
        done = run(user=60800, folders=[closed], command=["/bin/true"])
        assert done.returncode == EXIT_SETUP_FAILED
        assert f"{closed} cannot be read by the sandbox's user 60800" in done.stderr


@needs_root
def test_an_owned_folder_belongs_to_the_user_there_and_not_elsewhere():
    with tempfile.TemporaryDirectory() as closed:
        (Path(closed) / "note").write_text("hello", encoding="ascii")
        (Path(closed) / "note").chmod(0o600)
        script = 'stat -c "%u %g" "$1" "$1/note"; cat "$1/note"; stat -c "%u %g" "$2"'
        command = ["/bin/sh", "-c", script, "x", "{0}", "/usr"]
        done = run(user=60800, folders=[closed], owned=[True], command=command)
        assert done.stdout == "60800 60800\n60800 60800\nhello0 0\n", done.stderr
        assert (Path(closed) / "note").stat().st_uid == 0


@needs_root
def test_root_without_the_right_to_switch_users_is_refused():
    without_setuid = "/usr/bin/setpriv --bounding-set -setuid --inh-caps -setuid".split()
    done = run(*without_setuid, user=60800, command=["/bin/true"])
    assert done.returncode == EXIT_SETUP_FAILED
    assert "CAP_SETUID" in done.stderr
