"""Calls in forks: results, and what a function does that computes, crashes or takes memory."""

import os
import re
import signal

import pytest

from mega_agentrl.sandbox.limited_fork import ForkError, ForkTimeError, call_in_fork

NUM_BYTES = 1 << 40


def call(function, cpu_s=60.0):
    return call_in_fork(function, cpu_s=cpu_s, num_bytes=NUM_BYTES)


def test_a_fork_gives_the_result_of_any_size_and_leaves_no_process_and_no_descriptor():
    before = os.listdir("/proc/self/fd")
    assert call(lambda: b"") == b""
    assert call(lambda: b"x" * (1 << 20)) == b"x" * (1 << 20)
    pid = int(call(lambda: str(os.getpid()).encode()))
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # this process may have other children


def test_native_code_that_computes_on_ends_with_its_processor_time():
    with pytest.raises(ForkTimeError):
        call(lambda: bytes(bool(re.match("(a|aa)+$", "a" * 100 + "b"))), cpu_s=0.05)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSEGV), id="crash"),
        pytest.param(lambda: bytearray(2 * NUM_BYTES), id="memory"),
        pytest.param(lambda: {}["x"], id="exception"),
    ],
)
def test_a_fault_of_the_function_is_an_error_of_the_call(function):
    with pytest.raises(ForkError) as caught:
        call(function)
    assert type(caught.value) is ForkError
