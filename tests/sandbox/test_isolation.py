"""The wall's command, and what is said where it cannot be built."""

import stat
import sys
from pathlib import Path

import pytest

from mega_agentrl.sandbox.isolation import (
    PROGRAM_PATH,
    check_isolation,
    interpreter_command,
    interpreter_folders,
    interpreter_path,
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
    command = interpreter_command("{}")
    assert "--bind" not in command
    assert command[-5:] == [interpreter_path(), "-I", "-B", PROGRAM_PATH, "{}"]
    bound = {command[i + 1] for i, word in enumerate(command) if word == "--ro-bind"}
    allowed = {str(folder) for folder in interpreter_folders()} | {sys.prefix}
    rest = {
        path for path in bound - allowed if not path.startswith(("/usr", "/lib", "/bin", "/sbin"))
    }
    assert [Path(path).name for path in rest] == ["interpreter.py"]


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
    command = interpreter_command("{}")
    place = command.index("/tmp/clone/.venv")
    assert command[place - 1 : place + 2] == [
        "--ro-bind",
        "/tmp/clone/.venv",
        "/sandbox/environment",
    ]


def test_an_interpreter_below_tmp_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python")
    with pytest.raises(ValueError, match="expected a place outside /tmp"):
        interpreter_folders()
