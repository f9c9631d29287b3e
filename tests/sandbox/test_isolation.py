"""The bubblewrap command, and the errors where it cannot work."""

import json
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
    monkeypatch.setattr(sys, "executable", "/tmp/clone/.venv/bin/python")
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
