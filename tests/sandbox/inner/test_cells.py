"""Cells from outside: who lives while branches are made and closed, and what a failure leaves."""

import itertools
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mega_agentrl.sandbox.inner import cells, kernel, processes
from tests.sandbox.inner.inner_program import (
    WAIT_S,
    begin,
    done,
    forked,
    ordered,
    output,
    program,
    run,
    wait_for,
)

IDLE = 3
"""The hands, their next helper and a spare cell."""


@pytest.fixture(scope="module")
def walled():
    with program(stateful=True, num_processes=8) as one:
        yield one


@pytest.fixture(scope="module")
def plain():
    """Without a wall."""
    with program(stateful=True, walled=False) as one:
        yield one


@pytest.fixture
def session(walled):
    wait_for(lambda: len(walled.cells()) == IDLE)
    made = walled.open()
    yield made
    made.close()


def cell_of(program_, session, _numbers=itertools.count()):  # noqa: B008  one for all
    """Process id, as we see it, of the session's cell: it takes a name nobody else has."""
    name = f"cell{next(_numbers)}"
    run(session, f"open('/proc/self/comm', 'w').write({name!r})")
    (pid,) = [pid for pid in program_.cells() if name_of(pid) == name]
    return pid


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def kernel_id(pid):
    """Its number in its own namespace."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").open())
    return int(fields["NSpid"].split()[-1])


def test_a_cell_is_stopped_between_calls(walled, session):
    output(session, "print(1)")
    pid = cell_of(walled, session)
    assert processes.state(pid) == "T"
    assert output(session, "import os; print(os.getpid())") == "1"


def test_a_forked_cell_stays_until_its_last_branch_ends(walled, session):
    run(session, "x = 1")
    root = cell_of(walled, session)
    child = forked(session)
    assert len(processes.children(root)) == 1
    run(session, "")  # the session goes on in a branch of its own
    assert len(processes.children(root)) == 2
    wait_for(lambda: len(walled.cells()) == IDLE + 3)
    child.close()
    wait_for(lambda: len(walled.cells()) == IDLE + 2)
    assert processes.state(root) == "T"
    session.close()
    wait_for(lambda: len(walled.cells()) == IDLE)
    wait_for(lambda: processes.state(root) == "X")


def test_the_end_of_a_branch_is_no_end_of_its_relatives(walled, session):
    run(session, "x = 1")
    children = [forked(session) for _ in range(2)]
    begin(children[0], "import time; time.sleep(60)")
    assert run(children[1], "import os; os._exit(5)")["end"] == "exit"
    children[0].send({"order": "cancel", "id": 1})
    assert done(children[0])["end"] == "cancelled"
    answer = run(session, "print(x)")
    assert (answer["stdout"], answer["fresh"]) == ("1\n", False)
    for one in children:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGCONT])
def test_a_signal_to_its_group_reaches_no_relative(walled, session, number):
    run(
        session,
        "import os, signal, threading, time\nfor n in (15, 18): signal.signal(n, lambda *a: None)\n"
        "def spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()",
    )
    root = cell_of(walled, session)
    children = [forked(session) for _ in range(2)]
    for place, one in enumerate(children):
        run(one, f"x = {place}")
    stopped = {pid for pid in walled.cells() if processes.state(pid) == "T"}
    assert root in stopped
    before = processes.cpu_s(root)
    assert run(children[0], f"os.kill(0, {int(number)}); time.sleep(0.1)")["alive"]
    assert stopped <= {pid for pid in walled.cells() if processes.state(pid) == "T"}
    assert processes.cpu_s(root) == before
    for place, one in enumerate(children):
        assert output(one, "print(x)") == str(place)
        one.close()


@pytest.mark.parametrize("name", ["os.setsid", "kernel.drop_capabilities", "kernel.clone"])
def test_a_fork_that_the_code_has_tampered_with_is_refused(session, name):
    """Whatever it puts in place of our functions: what it makes is looked at from outside."""
    code = (
        "import os, sys\nfrom importlib import import_module\n"
        "kernel = sys.modules['mega_agentrl.sandbox.inner.kernel']\n"
        f"kept = {name}; {name} = (lambda *a: os.fork()) if 'clone' in {name!r} else lambda *a: 0"
    )
    assert output(session, code) == ""
    child = ordered(session, "fork")
    answer = session.receive(timeout_s=WAIT_S)
    assert answer["event"] == "failed"
    assert "a branch is not what was ordered" in answer["error"]
    child.close()
    assert output(session, f"{name} = kept") == ""
    child = forked(session)
    child.close()


def test_nobody_writes_to_files_that_are_copied(session):
    """What a thread starts while its cell is awake for the fork."""
    code = (
        "import os, threading, time\nawake = False\n"
        "def swap():\n    while True:\n"
        "        for n in range(60):\n"
        "            os.mkfifo('/tmp/pipe'); os.rename('/tmp/pipe', f'/tmp/f{n}')\n"
        "            open('/tmp/file', 'w').close(); os.rename('/tmp/file', f'/tmp/f{n}')\n"
        "def start():\n    while not awake: time.sleep(0.0005)\n"
        "    if os.fork() == 0: swap()\n    time.sleep(60)\n"
        "for n in range(60): open(f'/tmp/f{n}', 'w').close()\n"
        "threading.Thread(target=start, daemon=True).start()"
    )
    run(session, code)
    run(session, "awake = True")
    for _ in range(3):
        child = forked(session)
        names = output(child, "print(*sorted(os.listdir('/tmp')))").split()
        assert set(names) - {"pipe", "file"} == {f"f{n}" for n in range(60)}
        child.close()


def test_every_branch_has_the_whole_limit_of_processes(session):
    code = (
        "import os, resource, time\nmade = 0\n"
        "try:\n    while made < 50: os.fork() or time.sleep(60); made += 1\n"
        "except BlockingIOError: pass\n"
        "print(made, resource.getrlimit(resource.RLIMIT_NPROC)[0])"
    )
    assert output(session, code) == "7 8"
    child = forked(session)
    for one in (child, session):  # those who made its folders count until they have ended
        wait_for(lambda one=one: output(one, code) == "7 8")
    child.close()


def test_a_cell_killed_while_idle_fails_the_fork_and_is_told(walled, session):
    run(session, "x = 1")
    pid = cell_of(walled, session)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes.state(pid) in "ZX")
    child = ordered(session, "fork")
    assert session.receive(timeout_s=WAIT_S)["event"] == "failed"
    child.close()
    answer = run(session, "print('x' in dir())")
    assert (answer["stdout"], answer["fresh"], answer["alive"]) == ("False\n", True, True)


def test_a_killed_spare_cell_is_replaced(walled):
    wait_for(lambda: len(walled.cells()) == IDLE)
    time.sleep(0.1)  # an earlier test's cell may just be on its way out, the spare one on its way
    wait_for(lambda: len(walled.cells()) == IDLE)
    (spare,) = (pid for pid in walled.cells() if kernel_id(pid) == 1)
    os.kill(spare, signal.SIGKILL)
    wait_for(lambda: processes.state(spare) in "ZX")
    assert output(walled.main, "print(1)") == "1"
    wait_for(lambda: len(walled.cells()) == IDLE)


def test_without_a_wall_files_are_copied_and_removed(plain):
    wait_for(lambda: len(plain.cells()) == 1)
    session = plain.open()
    folder = Path(output(session, "import os; open('f', 'w').write('a'); print(os.getcwd())"))
    child = forked(session)
    code = "print(open('f').read(), os.getcwd())"
    content, other = output(child, code).split()
    assert (content, folder != Path(other)) == ("a", True)
    output(child, "open('f', 'w').write('b')")
    content, own = output(session, code).split()
    assert content == "a"
    folders = [folder, Path(other), Path(own)]
    assert len(set(folders)) == 3
    child.close()
    session.close()
    wait_for(lambda: not any(one.exists() for one in folders))
    wait_for(lambda: len(plain.cells()) == 1)


def test_without_a_wall_what_a_call_started_ends_with_it(plain):
    session = plain.open()
    code = (
        "import subprocess\n"
        "print(subprocess.Popen(['/bin/sleep', '60'], start_new_session=True).pid)"
    )
    assert processes.state(int(output(session, code))) in "ZX"
    session.close()


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def test_pipes_are_closed_but_for_what_was_taken():
    before = num_fds()
    with cells._Pipes():
        assert num_fds() == before + 6
    assert num_fds() == before
    with pytest.raises(KeyError), cells._Pipes() as pipes:
        pipes.take()
        raise KeyError
    assert num_fds() == before
    with cells._Pipes() as pipes:
        control, outputs = pipes.take()
    assert num_fds() == before + 3
    control.close()
    for fd in outputs:
        os.close(fd)
    assert num_fds() == before


def test_a_branch_that_is_no_first_process_of_its_own_is_refused():
    own = SimpleNamespace(pid=os.getpid())
    with pytest.raises(ValueError, match="a branch is not what was ordered"):
        cells._check_branch(own, own)


def test_limits_of_processes_of_another():
    child = subprocess.Popen(["/bin/sleep", "60"])
    soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NPROC)
    cells._limit_processes(child.pid, 3)
    assert resource.prlimit(child.pid, resource.RLIMIT_NPROC) == (3, hard)
    cells._limit_processes(child.pid, None)
    assert resource.prlimit(child.pid, resource.RLIMIT_NPROC) == (hard, hard)
    child.kill()
    child.wait(5)
    assert soft <= hard or hard == resource.RLIM_INFINITY


def test_a_listener_lets_one_clone_of_one_process_through(monkeypatch):
    flags = kernel.clone_register(kernel.CELL_FLAGS | kernel.CLONE_NEWNET)
    answers = []

    def ask(pid, number, first):
        def ioctl(fd, request, buffer):
            if request == kernel.ANSWER_REQUEST:
                answers.append(bytes(buffer))
            else:
                kernel._NOTIFICATION.pack_into(buffer, 0, 9, pid, 0, number, 0, 0, first, *[0] * 5)

        monkeypatch.setattr(cells.fcntl, "ioctl", ioctl)
        listener.answer()

    reading, writing = os.pipe()
    listener = cells.Listener(reading)
    listener.answer()  # nobody asks
    os.write(writing, b".")
    refused, let_go = (bytes(kernel.answer(9, error=error)) for error in (1, 0))
    ask(5, kernel.CLONE_NUMBER, flags)
    listener.allow(5)
    ask(6, kernel.CLONE_NUMBER, flags)
    ask(5, kernel.CLONE_NUMBER + 1, flags)
    ask(5, kernel.CLONE_NUMBER, flags | kernel.CLONE_NEWUTS)
    ask(5, kernel.CLONE_NUMBER, flags)
    ask(5, kernel.CLONE_NUMBER, flags)  # once
    listener.allow(5)
    listener.allow(None)
    ask(5, kernel.CLONE_NUMBER, flags)
    assert answers == [refused] * 4 + [let_go] + [refused] * 2
    os.close(reading)
    os.close(writing)


def test_one_who_asked_and_is_gone_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b".")

    def ioctl(fd, request, buffer):
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(cells.fcntl, "ioctl", ioctl)
    begun = time.monotonic()
    cells.Listener(reading).answer()
    assert time.monotonic() - begun < 1
    os.close(reading)
    os.close(writing)
