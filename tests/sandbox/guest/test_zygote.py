"""The zygote: what it serves, and that a supervisor's end is the end of its session alone."""

import os
import signal

import pytest

from mega_agentrl.sandbox.guest import processes
from tests.sandbox.guest.guest_program import WAIT_S, forked, output, program, run, wait_for


@pytest.fixture(scope="module")
def stateful():
    with program(stateful=True) as one:
        yield one


OUTLIVE = (
    "import ctypes, os, signal, time\n"
    "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
    "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal when the parent dies"
)


def test_nothing_outlives_a_supervisor_that_is_killed(stateful):
    wait_for(lambda: not stateful.guest_pids())
    num_fds = stateful.num_fds()
    doomed = stateful.open_session()
    (supervisor_pid,) = processes.child_pids(stateful.warm_pid())
    run(doomed, OUTLIVE)
    child = forked(doomed)
    run(child, OUTLIVE)
    doomed_pids = stateful.guest_pids()
    other = stateful.open_session()
    assert output(other, "x = 3; print(x)") == "3"
    os.kill(supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not doomed_pids & stateful.guest_pids())
    for channel in (doomed, child):
        with pytest.raises((EOFError, ConnectionResetError)):
            channel.receive(timeout_s=WAIT_S)
        channel.close()
    assert output(other, "print(x)") == "3"
    other.close()
    wait_for(lambda: not stateful.guest_pids())
    wait_for(lambda: stateful.num_fds() == num_fds)


@pytest.mark.parametrize("order", ["fork", "prepare", "run"])
def test_an_order_of_a_session_on_the_main_channel_fails(stateful, order):
    more = {"id": 1, "kind": "default", "code": "1", "timeout_s": 1.0} if order == "run" else {}
    stateful.main.send({"order": order, **more})
    assert stateful.main.receive(timeout_s=WAIT_S)["event"] == "failed"
    session = stateful.open_session()
    assert output(session, "print(1)") == "1"
    session.close()
