"""One holds, others wait, and the end of a process is a release."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mega_agentrl.tool.file_lock import hold_file_lock


def test_one_at_a_time_and_a_deadline(tmp_path):
    path = tmp_path / "lock"
    with (
        hold_file_lock(path, 1),
        pytest.raises(TimeoutError, match="another process"),
        hold_file_lock(path, 0.05),
    ):
        raise AssertionError
    with hold_file_lock(path, 0.05):
        pass


def test_waiting_ends_with_the_release(tmp_path):
    path, order = tmp_path / "lock", []

    def second():
        with hold_file_lock(path, 5):
            order.append("second")

    with hold_file_lock(path, 1):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]


def test_a_killed_process_holds_nothing(tmp_path):
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mega_agentrl.tool.file_lock import hold_file_lock\n"
        "with hold_file_lock(Path(sys.argv[1]), 1):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError), hold_file_lock(path, 0.05):
            pass
        os.kill(child.pid, signal.SIGKILL)
        with hold_file_lock(path, 5):
            pass
