"""The program's start: what it warms, what it refuses, how it ends."""

import socket
import subprocess
from pathlib import Path

import pytest

from mega_agentrl.sandbox.inner.main import main
from mega_agentrl.sandbox.inner.settings import Settings
from mega_agentrl.sandbox.isolation import open_command
from tests.sandbox.inner.inner_program import WAIT_S, output, program


def test_a_kernel_that_does_not_list_children_is_refused(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match="CONFIG_PROC_CHILDREN"):
        main(Settings(stateful=True).to_json())


@pytest.mark.parametrize("walled", [True, False])
def test_warm_quiet_and_alone(walled):
    with program(walled=walled, preload=("this", "colorsys")) as one:
        assert one.first == {"event": "up"}
        assert "Beautiful is better than ugly." in one.said()  # printed by an import
        assert output(one.main, "print(1)") == "1"
        code = (
            "import gc, os, sys\n"
            "print('colorsys' in sys.modules, gc.get_freeze_count() > 1000)\n"
            "print(os.read(0, 1), os.readlink('/proc/self/fd/0'))\n"
            "print(sys.path[0] == '', '/sandbox' in sys.path, os.environ['HOME'])"
        )
        lines = output(one.main, code).splitlines()
        assert lines == ["True True", "b'' /dev/null", "True False /tmp"]


def test_ends_well_when_its_channel_closes():
    with program(walled=False) as one:
        host, cells = one.host(), one.cells()
        one.main.close()
        assert one.child.wait(WAIT_S) == 0
        assert one.said() == ""
        assert not [pid for pid in (host, *cells) if Path(f"/proc/{pid}").exists()]


def test_what_cannot_be_imported_is_told_and_nothing_is_served():
    command = open_command(Settings(walled=False, preload=("no_such_module",)).to_json())
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=WAIT_S)
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith(b"No module named 'no_such_module'")
        assert ours.recv(1) == b""
