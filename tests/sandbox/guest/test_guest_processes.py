"""Small trees of real processes, looked at and ended from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mega_agentrl.sandbox.guest import processes
from tests.sandbox.guest.guest_program import wait_for

BEGIN = (
    "import json, os, signal, sys, threading, time\n"
    "def child(work):\n"
    "    pid = os.fork()\n"
    "    if pid == 0:\n"
    "        work(); time.sleep(60); os._exit(0)\n"
    "    return pid\n"
    "def rest(): pass\n"
    "def say(**facts): print(json.dumps(facts), flush=True); time.sleep(60)\n"
)


@pytest.fixture
def tree():
    """Start a tree whose program says its process ids; all of it ends with the test."""
    started = []

    def start(code):
        top = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BEGIN + code],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(top)
        return top.pid, json.loads(top.stdout.readline())

    yield start
    for top in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(top.pid, signal.SIGKILL)
        top.wait(300)
        top.stdout.close()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    processes.wait_until_stopped(pid)


def test_child_pids_are_of_every_thread_and_zombies_too(tree):
    code = (
        "found = [child(rest)]\n"
        "def other(): found.append(child(rest)); ready.set(); time.sleep(60)\n"
        "ready = threading.Event(); threading.Thread(target=other, daemon=True).start()\n"
        "ready.wait(); found.append(os.fork() or os._exit(0))\n"
        "say(found=found)"
    )
    top, facts = tree(code)
    zombie = facts["found"][2]
    wait_for(lambda: processes.process_state(zombie) == "Z")
    assert sorted(processes.child_pids(top)) == sorted(facts["found"])
    assert processes.child_pids(facts["found"][0]) == []
    assert top in processes.child_pids(os.getpid())


def test_process_state_is_read_whatever_the_name(tree):
    top, _ = tree("open('/proc/self/comm', 'w').write('a) R 9 (b'); say()")
    wait_for(lambda: processes.process_state(top) == "S")
    stop(top)
    assert processes.process_state(top) == "T"
    assert processes.process_state(top, top) == "T"
    os.kill(top, signal.SIGCONT)
    wait_for(lambda: processes.process_state(top) == "S")


def test_cpu_time_is_of_all_threads(tree):
    code = (
        "def burn():\n"
        "    end = time.thread_time() + 0.1\n"
        "    while time.thread_time() < end: pass\n"
        "both = [threading.Thread(target=burn) for _ in range(2)]\n"
        "[one.start() for one in both]; [one.join() for one in both]\n"
        "say(cpu_s=time.process_time())"
    )
    top, facts = tree(code)
    assert facts["cpu_s"] >= 0.2
    assert processes.cpu_time_s(top) == pytest.approx(facts["cpu_s"], abs=0.05)


def test_a_process_that_is_gone_has_no_state_time_or_children():
    child = subprocess.Popen(["/bin/true"])
    child.wait(300)
    assert processes.process_state(child.pid) == "X"
    assert processes.cpu_time_s(child.pid) == 0.0
    assert processes.child_pids(child.pid) == []
    processes.wait_until_stopped(child.pid)
    processes.kill_descendants(child.pid, spare=set())


def test_a_stopped_process_has_every_thread_stopped(tree):
    code = (
        "def spin():\n    while True: pass\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
        "say()"
    )
    top, _ = tree(code)
    stop(top)
    threads = [int(name) for name in os.listdir(f"/proc/{top}/task")]
    assert len(threads) == 4
    assert {processes.process_state(top, thread) for thread in threads} == {"T"}


def test_waiting_for_a_process_that_runs_on_times_out(tree):
    top, _ = tree("say()")
    with pytest.raises(TimeoutError):
        processes.wait_until_stopped(top, 0.1)


def test_processes_that_never_stop_time_out(tree, monkeypatch):
    top, _ = tree("say(son=child(rest))")
    stop(top)
    monkeypatch.setattr(processes, "_is_stopped", lambda pid: False)
    with pytest.raises(TimeoutError):
        processes.kill_descendants(top, spare=set(), timeout_s=0.1)


def test_leftovers_end_and_spared_processes_live_on(tree):
    code = (
        "reading, writing = os.pipe()\n"
        "def nest(): os.write(writing, b'%d ' % child(rest))\n"
        "sons = [child(nest), child(nest), os.fork() or os._exit(0)]\n"
        "text = b''\nwhile text.count(b' ') < 2: text += os.read(reading, 100)\n"
        "say(sons=sons, grandsons=[int(word) for word in text.split()])"
    )
    top, facts = tree(code)
    first, second, zombie = facts["sons"]
    inner = {processes.child_pids(son)[0]: son for son in (first, second)}
    assert set(inner) == set(facts["grandsons"])
    stop(top)
    processes.kill_descendants(top, spare={second})
    states = {one: processes.process_state(one) for one in (first, second, *inner)}
    assert states[first] in "ZX"
    assert states[second] in "RS"
    for grandson, son in inner.items():
        assert states[grandson] in ("ZX" if son == first else "RS")
    assert processes.process_state(zombie) == "Z"
    assert processes.process_state(top) == "T"
    processes.kill_descendants(top, spare=set())
    assert all(processes.process_state(one) in "ZX" for one in (first, second, *inner))


def test_a_leftover_that_another_one_continues_ends(tree):
    """A SIGCONT takes back a SIGSTOP that its process has not seen yet."""
    code = (
        "sleeper = child(rest)\n"
        "def wake():\n"
        "    while True: os.kill(sleeper, signal.SIGCONT)\n"
        "say(sleeper=sleeper, waker=child(wake))"
    )
    top, facts = tree(code)
    stop(top)
    processes.kill_descendants(top, spare=set())
    assert {processes.process_state(facts[name]) for name in ("sleeper", "waker")} <= set("ZX")


def test_leftovers_that_go_on_forking_end(tree):
    code = (
        "def grow():\n"
        "    for _ in range(6): os.fork() and time.sleep(0.01)\n"
        "    time.sleep(60)\n"
        "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to us\n"
        "say(son=child(grow))"
    )
    top, _ = tree(code)
    time.sleep(0.03)
    stop(top)
    processes.kill_descendants(top, spare=set())
    found = processes._descendants(top, set())
    assert found
    assert {processes.process_state(one) for one in found} <= set("ZX")
