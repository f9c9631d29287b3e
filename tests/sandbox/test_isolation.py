"""The bubblewrap command, and the errors where it cannot work."""

import json
import stat
import sys
from pathlib import Path

import pytest

from mega_agentrl.sandbox.isolation import (
    GUEST_PATH,
    check_isolation,
    interpreter_folders,
    interpreter_path,
    isolated_command,
    pre_exec_command,
    unisolated_command,
)


def fake_bwrap(folder, monkeypatch, script):
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))


def test_works_here():
    check_isolation()


def test_missing_program_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="install the system package `bubblewrap`"):
        check_isolation()


def test_refused_namespaces_show_the_reason(monkeypatch, tmp_path):
    fake_bwrap(tmp_path, monkeypatch, "echo 'No permissions to create new namespace' >&2; exit 1")
    with pytest.raises(ValueError, match=r"No permissions.*user namespaces"):
        check_isolation()


def test_only_the_interpreter_is_bound_and_read_only():
    command = isolated_command("{}")
    assert "--bind" not in command
    assert command[-6:-2] == [interpreter_path(), "-I", "-B", "-c"]
    assert GUEST_PATH in command[-2]
    assert command[-1] == "{}"
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
    assert job["command"] == [
        "bwrap",
        "--ro-bind",
        "{0}",
        "/x",
        "--ro-bind",
        "{1}",
        "/y",
        "run",
        "{}",
    ]
    assert (job["user"], job["cgroups"]) == (7, ["/g/procs"])


def test_without_isolation_it_is_the_same_program():
    command = unisolated_command("{}")
    assert "bwrap" not in " ".join(command)
    assert command[-1] == "{}"
    assert sys.executable in command


def test_folders_hold_the_interpreter_and_do_not_overlap():
    folders = interpreter_folders()
    covered = [Path("/usr"), *folders]
    for needed in (Path(sys.base_prefix), Path(sys.executable).resolve()):
        assert any(needed.is_relative_to(folder) for folder in covered)
    for folder in folders:
        assert not any(folder.is_relative_to(other) for other in folders if other != folder)


def test_an_environment_below_tmp_is_seen_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/tmp/clone/.venv")
    monkeypatch.setattr(sys, "executable", "/tmp/clone/.venv/bin/python")
    monkeypatch.setattr(sys, "base_prefix", "/opt/python")
    monkeypatch.setattr(Path, "resolve", lambda path: Path("/opt/python/bin/python3.11"))
    assert interpreter_path() == "/sandbox/environment/bin/python"
    command = isolated_command("{}")
    place = command.index("reach:/tmp/clone/.venv")
    assert command[place + 1] == "/sandbox/environment"


def test_an_interpreter_below_tmp_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python")
    with pytest.raises(ValueError, match="expected a place outside /tmp"):
        interpreter_folders()
