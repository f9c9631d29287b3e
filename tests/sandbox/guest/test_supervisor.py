"""The supervisor's protocol, spoken by hand to a real guest program."""

import fcntl
import os
import signal
import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.supervisor import OutputBuffer
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
from tests.sandbox.sandboxes import named, wait_until_running

LIMIT = 100


@pytest.fixture(scope="module")
def stateless():
    with program(max_output_bytes=LIMIT, cpu_limit_s=1.0) as one:
        yield one


@pytest.fixture(scope="module")
def stateful():
    with program(stateful=True, max_output_bytes=LIMIT, cpu_limit_s=1.0) as one:
        yield one


@pytest.fixture(params=["call", "session"])
def client(request, stateless, stateful):
    """A channel that takes calls, and whether calls share state."""
    if request.param == "call":
        yield stateless.main, False
    else:
        made = stateful.open_session()
        yield made, True
        made.close()


def test_a_call_returns_its_output_and_exit_code(client):
    channel, stateful_client = client
    begin(channel, "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)", number=7)
    expected = {"end": "exit", "code": 3, "stdout": "1\n", "stderr": "2\n", "num_dropped_bytes": 0}
    assert done(channel, number=7) == expected | {"state_lost": False, "alive": stateful_client}


def test_beginning_of_stdout_and_end_of_stderr_are_kept(client):
    channel, _ = client
    print_both = "print('b' + 'x' * 400, end='e')\nprint('b' + 'y' * 400, file=sys.stderr)"
    code = f"import sys\n{print_both}\n1 / 0"
    answer = run(channel, code)
    assert answer["stdout"] == "b" + "x" * (LIMIT - 1)
    assert len(answer["stderr"]) == LIMIT
    assert answer["stderr"].endswith("\nZeroDivisionError: division by zero\n")
    traceback = 'Traceback (most recent call last):\n  File "<string>", line 4, in <module>\n'
    written = 402 + 402 + len(traceback) + len("ZeroDivisionError: division by zero\n")
    assert answer["num_dropped_bytes"] == written - 2 * LIMIT


def test_more_output_than_a_pipe_holds_does_not_block(client):
    channel, _ = client
    answer = run(channel, "import os\nfor _ in range(300): os.write(1, b'z' * 10_000)")
    assert (answer["stdout"], answer["num_dropped_bytes"]) == ("z" * LIMIT, 3_000_000 - LIMIT)


def test_a_long_code_arrives_whole(client):
    channel, _ = client
    assert output(channel, f"x = '{'q' * 3_000_000}'; print(len(x))") == "3000000"


def test_executors_and_annotations_work_as_anywhere(client):
    channel, _ = client
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\n"
        "def f(x: int): return x\n"
        "print(pool.submit(f, 8).result(), f.__annotations__)"
    )
    assert output(channel, code) == "8 {'x': <class 'int'>}"


@pytest.mark.parametrize(
    ("code", "end", "number"),
    [
        ("import time; time.sleep(60)", "timeout", signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", "exit", signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)\nos._exit(4)", "exit", -4),
    ],
)
def test_each_end_of_a_call_is_told_and_the_next_call_works(client, code, end, number):
    channel, stateful_client = client
    answer = run(channel, code, timeout_s=0.4 if end == "timeout" else WAIT_S)
    assert (answer["end"], answer["code"], answer["alive"]) == (end, -number, False)
    after = run(channel, "print('again')")
    assert (after["stdout"], after["state_lost"], after["alive"]) == (
        "again\n",
        stateful_client,
        stateful_client,
    )
    assert not run(channel, "")["state_lost"]


def test_cpu_time_is_counted(session):
    code = (
        "import signal, threading; signal.signal(signal.SIGXCPU, lambda *a: None)\n"
        "def spin():\n    while True: pass\n"
        "for _ in range(2): threading.Thread(target=spin, daemon=True).start()\nspin()"
    )
    answer = run(session, code)
    assert (answer["end"], answer["code"]) == ("cpu", -signal.SIGKILL)


def test_cancel_ends_that_call_and_no_other(client):
    channel, stateful_client = client
    channel.send({"order": "cancel", "id": 1})  # nothing runs
    code, name = named("import time\ntime.sleep(600)")
    begin(channel, f"print('begun', flush=True)\n{code}", number=2)
    wait_until_running(name)
    channel.send({"order": "cancel", "id": 1})
    channel.send({"order": "cancel", "id": 3})
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.2)
    channel.send({"order": "cancel", "id": 2})
    answer = done(channel, number=2)
    assert (answer["end"], answer["code"]) == ("cancelled", -signal.SIGKILL)
    assert (answer["stdout"], answer["alive"]) == ("begun\n", False)
    channel.send({"order": "cancel", "id": 2})  # too late
    assert run(channel, "print(4)", number=4)["state_lost"] is stateful_client


def test_fork_of_a_lost_state_says_so(session):
    assert not run(session, "import os; os._exit(0)")["alive"]
    child = forked(session)
    for one in (child, session):
        assert [run(one, "")["state_lost"] for _ in range(2)] == [True, False]
    child.close()


@pytest.mark.parametrize("order", ["fork", "open"])
def test_an_order_without_its_channel_fails(stateful, session, order):
    channel = session if order == "fork" else stateful.main
    channel.send({"order": order})
    answer = channel.receive(timeout_s=WAIT_S)
    assert answer == {"event": "failed", "error": "got 0 descriptors, expected 1"}
    assert output(session, "print(1)") == "1"


def test_a_fork_that_cannot_be_fails_and_the_session_goes_on(stateful, session):
    before = stateful.guest_pids()
    run(session, "import os; x = 5\nfor _ in range(140): os.mkdir('d'); os.chdir('d')")
    child = ordered(session, "fork")
    answer = session.receive(timeout_s=WAIT_S)
    assert answer["event"] == "failed"
    assert "nested more than 128 deep" in answer["error"]
    with pytest.raises(EOFError):
        child.receive(timeout_s=WAIT_S)
    child.close()
    after = run(session, "print(x); os.chdir('/tmp')\nimport shutil\nos.system('rm -rf d')")
    assert (after["stdout"], after["state_lost"]) == ("5\n", False)
    child = forked(session)
    assert output(child, "print(x)") == "5"
    child.close()
    wait_for(lambda: len(stateful.guest_pids()) <= len(before) + 1)


def at_rest(look):
    """What is seen when it has not changed for a quarter of a second."""
    seen = []

    def is_still():
        seen.append(look())
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    wait_for(is_still)
    return seen[-1]


def test_closing_frees_everything(stateful):
    wait_for(lambda: not stateful.guest_pids())
    num_fds = at_rest(stateful.num_fds)
    first = stateful.open_session()
    run(first, "import subprocess; subprocess.Popen(['/bin/sleep', '60'])")
    others = [forked(first), forked(first)]
    others.append(forked(others[0]))
    for one in (first, *others):
        run(one, "")
    begin(others[0], "import time, os; os.fork(); time.sleep(60)")
    assert len(stateful.guest_pids()) >= 1 + 4 + 2  # the supervisor, interpreters, processes
    for one in (first, *others):
        one.close()
    wait_for(lambda: not stateful.guest_pids())
    wait_for(lambda: stateful.num_fds() == num_fds)


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff" * 8, struct.pack(">I", 2) + b"[]", struct.pack(">I", 3) + b"{,}"],
    ids=["too long", "no object", "no JSON"],
)
def test_nonsense_on_one_channel_harms_no_other(stateful, session, nonsense):
    num_processes = at_rest(lambda: len(stateful.guest_pids()))
    host_end, guest_end = socket.socketpair()
    with guest_end:
        stateful.main.send({"order": "open"}, (guest_end.fileno(),))
        stateful.main.receive(timeout_s=WAIT_S)
        os.close(stateful.main.take_fds(1)[0])
    begin(session, "import time; x = 3; time.sleep(0.3)")
    host_end.send(nonsense)
    bad = Channel(host_end)
    with pytest.raises((EOFError, ConnectionResetError)):
        bad.receive(timeout_s=WAIT_S)
    bad.close()
    assert done(session)["alive"]
    assert output(session, "print(x)") == "3"
    wait_for(lambda: len(stateful.guest_pids()) == num_processes)


def test_two_sessions_run_at_once(stateful, session):
    other = stateful.open_session()
    begin(session, "import time; time.sleep(600)", timeout_s=600)
    assert output(other, "print(2)") == "2"
    session.send({"order": "cancel", "id": 1})
    assert done(session)["end"] == "cancelled"
    other.close()


def buffer_of(chunks, num_first, num_last):
    reading, writing = os.pipe()
    buffer = OutputBuffer(reading, num_first, num_last)
    for chunk in chunks:
        os.write(writing, chunk)
        assert buffer.drain()
    os.close(writing)
    assert not buffer.drain()
    os.close(reading)
    return buffer


@example([b"abc", b"d"], 0, 0)
@example([b"a\xc3", b"\xa9"], 0, 9)  # one letter in two reads
@example([b"a\xc3\xa9"], 2, 2)  # one letter in both parts
@example([b"a\xc3\xa9"], 0, 1)
@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 50), st.integers(0, 50))
def test_the_first_and_the_last_bytes_are_kept_however_they_arrive(chunks, num_first, num_last):
    whole = b"".join(chunks)
    cut = max(0, len(whole) - num_first - num_last)
    buffer = buffer_of(chunks, num_first, num_last)
    assert buffer.num_dropped_bytes == cut
    note = f"\n[{cut} bytes cut]\n".encode() if cut and num_first and num_last else b""
    expected = whole[:num_first] + note + whole[num_first + cut :]
    assert buffer.text() == expected.decode("utf-8", "replace")


def test_a_drain_is_bounded():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 18)
    os.write(writing, b"x" * 200_000)
    buffer = OutputBuffer(reading, 1 << 20, 0)
    assert buffer.drain(num_reads=1)
    assert len(buffer.text()) == 1 << 16
    assert buffer.drain()
    assert len(buffer.text()) == 200_000
    os.close(reading)
    os.close(writing)


def test_draining_an_empty_pipe_does_not_block():
    reading, writing = os.pipe()
    assert OutputBuffer(reading, 0, 10).drain()
    os.close(reading)
    os.close(writing)
