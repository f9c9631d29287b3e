"""The child process of symbolic equality: its limits, its replacement and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from mega_agentrl.reward.matching import symbolic

MODULE = "tests.reward.matching.test_symbolic"
WAIT_S = 300.0
QUESTION = """
import os, sys
from mega_agentrl.reward.matching import symbolic
future = symbolic.submit("os.path:isabs", {"s": "/"}, 0.0)
assert future.result(300) == 1.0
import psutil
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
if sys.argv[1] == "abort":
    os._exit(1)
"""


def spin():
    """Hide the error of the limit as a library might, and go on."""
    while True:
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001
            pass


def fill_memory():
    return bool(bytearray(symbolic.MAX_MEMORY_BYTES))


def end_process():
    os._exit(3)


def ask(name):
    return symbolic.submit(f"{MODULE}:{name}", {}, 0.25)


@pytest.mark.extended
def test_a_question_that_takes_too_long_or_too_much_is_not_equal_and_the_next_is_answered():
    for name in ("spin", "fill_memory", "end_process"):
        assert ask(name).result(WAIT_S) == 0.25
        one = {"one": "x+1", "other": "1+x"}
        equal = symbolic.submit("mega_agentrl.reward.matching.symbolic:expressions_equal", one, 0.0)
        assert equal.result(WAIT_S) == 1.0


@pytest.mark.extended
def test_threads_share_one_child():
    grades = []

    def ask_in_thread():
        grades.append(symbolic.submit("os.path:isabs", {"s": "/"}, 0.0).result(WAIT_S))

    threads = [threading.Thread(target=ask_in_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grades == [1.0] * 4
    workers = [
        child for child in psutil.Process().children() if "worker_main" in str(child.cmdline())
    ]
    assert len(workers) == 1


@pytest.mark.extended
@pytest.mark.parametrize("end", ["exit", "abort"])
def test_the_child_ends_with_its_owner(end):
    asked = subprocess.run(
        [sys.executable, "-c", QUESTION, end], capture_output=True, text=True, timeout=WAIT_S
    )
    pids = [int(pid) for pid in asked.stdout.split()]
    assert pids, asked.stderr
    deadline = time.monotonic() + WAIT_S
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_decimals_are_fractions_and_case_has_a_meaning():
    assert symbolic.expressions_equal("0.1x+0.2x", "0.3x")
    assert not symbolic.expressions_equal("0.3333333333333333x", "x/3")
    assert not symbolic.expressions_equal("N+n", "2n")
    assert symbolic.expressions_equal("\\log(xy)", "\\log(xy)+0")
    assert not symbolic.expressions_equal("\\log(100)", "\\ln(100)")
