"""The program's start: what it warms, what it refuses, how it ends."""

import gc
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.sandbox.guest.main import WARM_UP_CODE, main, warm_up_interpreter
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.isolation import unisolated_command
from tests.sandbox.guest.guest_program import WAIT_S, output, program


def test_a_kernel_that_does_not_list_children_is_refused(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match="CONFIG_PROC_CHILDREN"):
        main(GuestSettings(stateful=True).to_json())


@pytest.mark.parametrize("isolated", [True, False])
def test_a_started_program_is_warm_and_an_interpreter_sees_nothing_of_it(isolated):
    with program(isolated=isolated, preload_modules=("this", "colorsys")) as one:
        assert one.first == {"event": "up"}
        assert "Beautiful is better than ugly." in one.log_text()  # printed by an import
        assert output(one.main, "print(1)") == "1"
        code = (
            "import gc, os, sys\n"
            "print('colorsys' in sys.modules, gc.get_freeze_count() > 1000)\n"
            "print(os.read(0, 1), os.readlink('/proc/self/fd/0'))\n"
            "print(sys.path[0] == '', '/sandbox' in sys.path, os.environ['HOME'])"
        )
        lines = output(one.main, code).splitlines()
        assert lines == ["True True", "b'' /dev/null", "True False /tmp"]


def test_the_program_ends_well_when_its_channel_closes():
    with program(isolated=False) as one:
        warm_pid, guest_pids = one.warm_pid(), one.guest_pids()
        one.main.close()
        assert one.child.wait(WAIT_S) == 0
        assert one.log_text() == ""
        assert not [pid for pid in (warm_pid, *guest_pids) if Path(f"/proc/{pid}").exists()]


def test_a_module_that_cannot_be_imported_is_named_and_nothing_is_served():
    settings = GuestSettings(isolated=False, preload_modules=("no_such_module",))
    command = unisolated_command(settings.to_json())
    host_end, guest_end = socket.socketpair()
    with host_end:
        with guest_end:
            done = subprocess.run(command, stdin=guest_end, capture_output=True, timeout=WAIT_S)
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith(b"No module named 'no_such_module'")
        assert host_end.recv(1) == b""


@pytest.mark.parametrize("name", WARM_UP_CODE)
def test_each_first_use_runs_and_leaves_nothing_in_main(name):
    main = set(vars(sys.modules["__main__"]))
    warm_up_interpreter([name])
    gc.unfreeze()
    assert name in sys.modules
    assert set(vars(sys.modules["__main__"])) == main
