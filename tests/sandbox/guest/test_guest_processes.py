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
        top.wait(10)
        top.stdout.close()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    processes.wait_until_stopped(pid)


def test_children_of_every_thread_zombies_too(tree):
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


def test_state_whatever_the_name(tree):
    top, _ = tree("open('/proc/self/comm', 'w').write('a) R 9 (b'); say()")
    wait_for(lambda: processes.process_state(top) == "S")
    stop(top)
    assert processes.process_state(top) == "T"
    assert processes.process_state(top, top) == "T"
    os.kill(top, signal.SIGCONT)
    wait_for(lambda: processes.process_state(top) == "S")


def test_cpu_time_of_all_threads(tree):
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


def test_what_is_gone():
    child = subprocess.Popen(["/bin/true"])
    child.wait(10)
    assert processes.process_state(child.pid) == "X"
    assert processes.cpu_time_s(child.pid) == 0.0
    assert processes.child_pids(child.pid) == []
    processes.wait_until_stopped(child.pid)
    processes.kill_descendants(child.pid, spare=set())


def test_still_means_every_thread(tree):
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


def test_one_that_is_not_stopped_is_told(tree, monkeypatch):
    monkeypatch.setattr(processes, "_STOP_TIMEOUT_S", 0.1)
    top, _ = tree("say()")
    with pytest.raises(TimeoutError, match=f"process {top} did not stop"):
        processes.wait_until_stopped(top)


def test_leftovers_end_and_the_spared_live_on(tree):
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
