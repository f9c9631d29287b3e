"""Children: empty environment, deadline, and a parent-death signal that follows the process."""

import subprocess
import threading
import time

import pytest

from mega_agentrl.sandbox.process import kill_child, run_command, start_child


def test_a_child_has_an_empty_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    child = start_child(["/usr/bin/env"], stdout=subprocess.PIPE)
    out, _ = child.communicate(timeout=300)
    assert out == b""


def test_a_command_ends_with_code_and_error_text_by_its_deadline():
    assert run_command(["/bin/sh", "-c", "echo no >&2; exit 3"], timeout_s=300) == (3, "no")
    with pytest.raises(TimeoutError):
        run_command(["/bin/sleep", "300"], timeout_s=0.2)
    with pytest.raises(FileNotFoundError) as missing:
        run_command(["/nowhere/none"], timeout_s=300)
    assert missing.value.filename == "/nowhere/none"


def test_child_survives_the_thread_that_asked_for_it():
    children = []

    def ask():
        command = ["/usr/bin/setpriv", "--pdeathsig", "KILL", "/bin/sleep", "300"]
        children.append(start_child(command))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert children[0].poll() is None
    kill_child(children[0])
    kill_child(children[0])
    assert children[0].poll() == -9
