"""The bubblewrap command, and the errors where it cannot work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.isolation import (
    GUEST_PATH,
    check_isolation,
    interpreter_folders,
    interpreter_path,
    isolated_command,
    pre_exec_command,
)


def test_missing_program_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError) as caught:
        check_isolation()
    assert "`bubblewrap`" in caught.value.cause


def test_refused_namespaces_show_the_reason(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError) as caught:
        check_isolation()
    assert caught.value.got == "exit code 1: No permissions to create new namespace"
    assert "user namespaces are refused" in caught.value.cause


CHECK = "from mega_agentrl.sandbox.isolation import check_isolation; check_isolation()"


def container(*options):
    """Run the check in a container made by bubblewrap; return the last line of its errors."""
    command = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", *options, sys.executable]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    run = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run([*command, "-c", CHECK], **run).stderr.strip().rpartition("\n")[2]


def test_containers_are_told_what_they_refuse():
    """A container that allows all, one that hides a part of /proc, and one without namespaces."""
    assert container() == ""
    # bubblewrap covers parts of a new /proc.
    assert "systempaths=unconfined" in container("--unshare-pid", "--proc", "/proc")
    assert "user namespaces are refused" in container("--disable-userns")


def test_only_the_interpreter_is_bound_and_read_only():
    command = isolated_command("{}")
    assert "--bind" not in command
    start = f"{GUEST_PATH}/mega_agentrl/sandbox/guest/start.py"
    assert command[-6:] == [interpreter_path(), "-I", "-B", start, "main", "{}"]
    bound = {command[i + 1] for i, word in enumerate(command) if word == "--ro-bind"}
    bound = {path.removeprefix("reach:") for path in bound}
    allowed = {str(folder) for folder in interpreter_folders()} | {sys.prefix}
    rest = {
        path for path in bound - allowed if not path.startswith(("/usr", "/lib", "/bin", "/sbin"))
    }
    assert [Path(path).name for path in rest] == ["guest"]


def test_pre_exec_gets_every_folder_to_bind():
    command = ["bwrap", "--ro-bind", "reach:/a b", "/x", "--ro-bind", "reach:/c", "/y", "run", "{}"]
    job = json.loads(pre_exec_command(command, user=7, cgroups=["/g/procs"])[-1])
    assert job["folders"] == ["/a b", "/c"]
    assert job["command"] == "bwrap --ro-bind {0} /x --ro-bind {1} /y run {}".split()
    assert (job["user"], job["cgroups"]) == (7, ["/g/procs"])


def test_folders_hold_the_interpreter_and_do_not_overlap():
    folders = interpreter_folders()
    covered = [Path("/usr"), *folders]
    for needed in (Path(sys.base_prefix), Path(sys.executable).resolve()):
        assert any(needed.is_relative_to(folder) for folder in covered)
    for folder in folders:
        assert not any(folder.is_relative_to(other) for other in folders if other != folder)


def test_an_environment_below_tmp_is_seen_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/tmp/clone/.venv")
    monkeypatch.setattr(sys, "executable", "/tmp/clone/runs/../.venv/bin/python")
    monkeypatch.setattr(sys, "base_prefix", "/opt/python")
    monkeypatch.setattr(Path, "resolve", lambda path: Path("/opt/python/bin/python3.11"))
    assert interpreter_path() == "/sandbox/environment/bin/python"
    command = isolated_command("{}")
    place = command.index("reach:/tmp/clone/.venv")
    assert command[place + 1] == "/sandbox/environment"


def test_an_interpreter_below_tmp_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python")
    with pytest.raises(InputError) as caught:
        interpreter_folders()
    assert caught.value.got == Path("/tmp/python")
