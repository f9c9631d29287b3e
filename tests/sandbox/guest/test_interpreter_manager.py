"""Interpreters seen from outside: which processes live while forks come and go, and failures."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from mega_agentrl.sandbox.guest import interpreter_manager, processes, syscalls
from tests.sandbox.guest.guest_program import (
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

IDLE = 1
"""The session's supervisor."""


@pytest.fixture(scope="module")
def isolated():
    with program(stateful=True, num_processes=8) as one:
        yield one


@pytest.fixture(scope="module")
def unisolated():
    """A guest program without isolation."""
    with program(stateful=True, isolated=False) as one:
        yield one


@pytest.fixture
def session(isolated):
    wait_for(lambda: not isolated.guest_pids())
    made = isolated.open_session()
    yield made
    made.close()


def interpreter_pid(program_, session, _numbers=itertools.count()):  # noqa: B008  one for all
    """Host process id of the session's interpreter, found by a unique process name."""
    name = f"guest{next(_numbers)}"
    run(session, f"open('/proc/self/comm', 'w').write({name!r})")
    (pid,) = [pid for pid in program_.guest_pids() if name_of(pid) == name]
    return pid


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def namespace_pid(pid):
    """Process id in its own PID namespace."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").open())
    return int(fields["NSpid"].split()[-1])


def test_forks_that_have_ended_do_not_stay_as_zombies(isolated, session):
    """The control group would count them, so that a session that forks often could fork no more."""
    run(session, "x = 1")
    root = interpreter_pid(isolated, session)
    for _ in range(3):
        forked(session).close()
        # The supervisor ends a fork after its channel has closed.
        wait_for(
            lambda: all(processes.process_state(pid) == "Z" for pid in processes.child_pids(root))
        )
        assert len(processes.child_pids(root)) == 1
    forked(session)
    assert len(processes.child_pids(root)) == 1


def test_a_forked_interpreter_stays_until_its_last_fork_ends(isolated, session):
    run(session, "x = 1")
    root = interpreter_pid(isolated, session)
    child = forked(session)
    assert len(processes.child_pids(root)) == 1
    run(session, "")  # the session continues in a fork of its own
    assert len(processes.child_pids(root)) == 2
    wait_for(lambda: len(isolated.guest_pids()) == IDLE + 3)
    child.close()
    wait_for(lambda: len(isolated.guest_pids()) == IDLE + 2)
    assert processes.process_state(root) == "T"
    session.close()
    wait_for(lambda: not isolated.guest_pids())
    wait_for(lambda: processes.process_state(root) == "X")


def test_the_end_of_a_fork_does_not_end_its_relatives(isolated, session):
    run(session, "x = 1")
    children = [forked(session) for _ in range(2)]
    begin(children[0], "import time; time.sleep(60)")
    assert run(children[1], "import os; os._exit(5)")["end"] == "exit"
    children[0].send({"order": "cancel", "id": 1})
    assert done(children[0])["end"] == "cancelled"
    answer = run(session, "print(x)")
    assert (answer["stdout"], answer["state_lost"]) == ("1\n", False)
    for one in children:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGCONT])
def test_a_signal_to_its_group_reaches_no_relative(isolated, session, number):
    run(
        session,
        "import os, signal, threading, time\nfor n in (15, 18): signal.signal(n, lambda *a: None)\n"
        "def spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()",
    )
    root = interpreter_pid(isolated, session)
    children = [forked(session) for _ in range(2)]
    for place, one in enumerate(children):
        run(one, f"x = {place}")
    stopped = {pid for pid in isolated.guest_pids() if processes.process_state(pid) == "T"}
    assert root in stopped
    before = processes.cpu_time_s(root)
    assert run(children[0], f"os.kill(0, {int(number)}); time.sleep(0.1)")["alive"]
    assert stopped <= {pid for pid in isolated.guest_pids() if processes.process_state(pid) == "T"}
    assert processes.cpu_time_s(root) == before
    for place, one in enumerate(children):
        assert output(one, "print(x)") == str(place)
        one.close()


@pytest.mark.parametrize("name", ["os.setsid", "syscalls.drop_capabilities", "syscalls.clone"])
def test_a_fork_that_the_code_has_tampered_with_is_refused(session, name):
    """Whatever it puts in place of our functions: what it makes is looked at from outside."""
    code = (
        "import os, sys\nfrom importlib import import_module\n"
        "syscalls = sys.modules['mega_agentrl.sandbox.guest.syscalls']\n"
        f"kept = {name}; {name} = (lambda *a: os.fork()) if 'clone' in {name!r} else lambda *a: 0"
    )
    assert output(session, code) == ""
    child = ordered(session, "fork")
    answer = session.receive(timeout_s=WAIT_S)
    assert answer["event"] == "failed"
    assert "the fork is not the process that was ordered" in answer["error"]
    child.close()
    assert output(session, f"{name} = kept") == ""
    child = forked(session)
    child.close()


def test_nobody_writes_to_files_that_are_copied(session):
    """Processes that a thread starts while its interpreter is resumed for the fork."""
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


def test_every_fork_has_the_full_process_limit(session):
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


def test_an_interpreter_killed_while_idle_fails_the_fork(isolated, session):
    run(session, "x = 1")
    pid = interpreter_pid(isolated, session)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes.process_state(pid) in "ZX")
    child = ordered(session, "fork")
    assert session.receive(timeout_s=WAIT_S)["event"] == "failed"
    child.close()
    answer = run(session, "print('x' in dir())")
    assert (answer["stdout"], answer["state_lost"], answer["alive"]) == ("False\n", True, True)


def test_a_killed_spare_interpreter_is_replaced():
    with program() as stateless:
        (spare,) = (pid for pid in stateless.guest_pids() if namespace_pid(pid) == 1)
        os.kill(spare, signal.SIGKILL)
        wait_for(lambda: processes.process_state(spare) in "ZX")
        assert output(stateless.main, "print(1)") == "1"


def test_a_supervisor_whose_interpreter_died_while_idle_uses_no_cpu(isolated, session):
    run(session, "x = 1")
    (supervisor_pid,) = processes.child_pids(isolated.warm_pid())
    pid = interpreter_pid(isolated, session)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes.process_state(pid) in "ZX")
    before = processes.cpu_time_s(supervisor_pid)
    time.sleep(0.5)
    assert processes.cpu_time_s(supervisor_pid) - before < 0.2


def test_without_isolation_files_are_copied_and_removed(unisolated):
    wait_for(lambda: not unisolated.guest_pids())
    session = unisolated.open_session()
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
    wait_for(lambda: not unisolated.guest_pids())


def test_without_isolation_processes_end_with_their_call(unisolated):
    session = unisolated.open_session()
    code = (
        "import subprocess\n"
        "print(subprocess.Popen(['/bin/sleep', '60'], start_new_session=True).pid)"
    )
    assert processes.process_state(int(output(session, code))) in "ZX"
    session.close()


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def test_pipes_are_closed_unless_detached():
    before = num_fds()
    with interpreter_manager.InterpreterPipes():
        assert num_fds() == before + 6
    assert num_fds() == before
    with pytest.raises(KeyError), interpreter_manager.InterpreterPipes() as pipes:
        pipes.detach()
        raise KeyError
    assert num_fds() == before
    with interpreter_manager.InterpreterPipes() as pipes:
        control, outputs = pipes.detach()
    assert num_fds() == before + 3
    control.close()
    for fd in outputs:
        os.close(fd)
    assert num_fds() == before


def test_a_listener_lets_one_clone_of_one_process_through(monkeypatch):
    flags = syscalls.clone_flags_register(syscalls.INTERPRETER_NAMESPACES | syscalls.CLONE_NEWNET)
    answers = []

    def ask(pid, number=syscalls.CLONE_NUMBER, first=flags, *, is_gone=False):
        def ioctl(fd, request, buffer):
            if is_gone:
                raise FileNotFoundError(2, "the caller is gone")
            if request == syscalls.SECCOMP_NOTIF_SEND:
                answers.append(bytes(buffer))
            else:
                syscalls._NOTIFICATION.pack_into(
                    buffer, 0, 9, pid, 0, number, 0, 0, first, *[0] * 5
                )

        monkeypatch.setattr(interpreter_manager.fcntl, "ioctl", ioctl)
        listener.respond()

    reading, writing = os.pipe()
    listener = interpreter_manager.SeccompListener(reading)
    listener.respond()  # nobody asks
    os.write(writing, b".")
    refused, let_go = (bytes(syscalls.pack_response(9, error=error)) for error in (1, 0))
    ask(5)
    listener.allow_fork(5, lambda answer: answer() is None)
    ask(6)
    ask(5, syscalls.CLONE_NUMBER + 1)
    ask(5, first=flags | syscalls.CLONE_NEWUTS)
    ask(5, is_gone=True)
    ask(5)
    ask(5)  # once
    listener.allow_fork(5, lambda answer: answer() is None)
    listener.allow_fork(None)
    ask(5)
    assert answers == [refused] * 4 + [let_go] + [refused] * 2
    os.close(reading)
    os.close(writing)
