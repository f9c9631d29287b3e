"""Real processes that clone when they are told to, traced by this one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mega_agentrl.sandbox.guest import processes
from mega_agentrl.sandbox.guest.clone_tracer import traced_clone
from tests.sandbox.guest.guest_program import wait_for

CODE = """
import hashlib, json, os, signal, sys, threading, time
def spin():  # without the interpreter's lock, which the main thread needs
    hashlib.pbkdf2_hmac('sha256', b'x', b'x', 1 << 30)
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: None)
def say(**facts): print(json.dumps(facts), flush=True)
say()
while word := sys.stdin.readline().strip():
    if word == 'fork' and os.fork() == 0:
        say(pid=os.getpid())
        time.sleep(60)
    elif word == 'answer': say()
"""


class Child:
    """A process with busy threads, which obeys words on its standard input."""

    def __init__(self):
        command = [sys.executable, "-I", "-S", "-c", CODE]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self.process.pid
        self.read()

    def tell(self, word):
        os.write(self.process.stdin.fileno(), word.encode() + b"\n")

    def read(self):
        return json.loads(self.process.stdout.readline())

    def traced(self):
        return traced_clone(self.pid, time.monotonic() + 60.0, is_child=True)

    def cpu_s(self):
        return processes.cpu_time_s(self.pid)


@pytest.fixture
def child():
    one = Child()
    yield one
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    one.process.wait(300)
    one.process.stdin.close()
    one.process.stdout.close()


def states(pid):
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {processes.process_state(pid, thread) for thread in threads}


def test_the_child_is_held_from_its_birth_until_the_end(child):
    with child.traced() as tracer:
        pid = tracer.run_clone(lambda: child.tell("fork"), lambda: False)
        assert processes.child_pids(child.pid) == [pid]
        assert states(child.pid) == states(pid) == {"t"}
        before = child.cpu_s() + processes.cpu_time_s(pid)
        time.sleep(0.1)
        assert child.cpu_s() + processes.cpu_time_s(pid) == before
    assert child.read() == {"pid": pid}
    wait_for(lambda: processes.process_state(pid) == "S")
    before = child.cpu_s()
    wait_for(lambda: child.cpu_s() > before)


def test_without_a_clone_only_the_main_thread_runs(child):
    with child.traced() as tracer:
        before = child.cpu_s()
        answers = []
        is_over = lambda: answers.append(child.read()) is None  # noqa: E731
        assert tracer.run_clone(lambda: child.tell("answer"), is_over) is None
        assert answers == [{}]
        assert states(child.pid) == {"t"}
        assert child.cpu_s() - before < 0.1
    wait_for(lambda: child.cpu_s() - before > 0.2)


def test_a_signal_is_delivered_after_the_tracing(child):
    with child.traced() as tracer:
        os.kill(child.pid, signal.SIGUSR1)
        assert tracer.run_clone(lambda: None, lambda: False) is None
    child.tell("answer")
    assert child.read() == {}
    with child.traced() as tracer:
        os.kill(child.pid, signal.SIGTERM)
        assert tracer.run_clone(lambda: None, lambda: False) is None
    assert child.process.wait(300) == -signal.SIGTERM


def test_after_the_deadline_there_is_no_child(child):
    with child.traced() as tracer:
        tracer._deadline = time.monotonic() + 0.1  # the threads have had the time to stop
        assert tracer.run_clone(lambda: None, lambda: False) is None
    child.tell("fork")
    assert child.read()["pid"] in processes.child_pids(child.pid)


def test_a_process_that_is_killed_meanwhile_can_be_collected(child):
    with child.traced() as tracer:
        os.kill(child.pid, signal.SIGKILL)
        has_ended = lambda: processes.process_state(child.pid) in "ZX"  # noqa: E731
        assert tracer.run_clone(lambda: None, has_ended) is None
    assert child.process.wait(300) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError), child.traced():
        pass
