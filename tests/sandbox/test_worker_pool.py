"""The pool of workers: results, deadlines, deaths, and that nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.guest.processes import child_pids, process_state
from mega_agentrl.sandbox.worker_pool import (
    FunctionFailedError,
    PoolClosedError,
    WorkerLostError,
    WorkerPool,
    WorkerTimeoutError,
    make_worker_call,
)
from tests.sandbox.guest.guest_program import wait_for

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


def name(function):
    return f"tests.sandbox.worker_functions:{function}"


def is_gone(pid):
    return process_state(pid) in "ZX"


@contextlib.contextmanager
def running(num_workers=1, timeout_s=60.0, **options):
    pool = WorkerPool(num_workers, timeout_s, **options)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def call(pool, function, **arguments):
    return pool.submit(name(function), arguments).result(WAIT_S)


@pytest.fixture(scope="module")
def pool():
    with running(2) as made:
        yield made


def test_each_call_gets_its_own_result_from_any_thread(pool):
    found = {}

    def ask(number):
        futures = [(i, pool.submit(name("add"), {"a": number, "b": i})) for i in range(50)]
        found[number] = [future.result(WAIT_S) == number + i for i, future in futures]

    threads = [threading.Thread(target=ask, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(all(right) for right in found.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=json_values)
def test_json_values_come_back_unchanged(pool, value):
    assert call(pool, "add", a=[value], b=[]) == [value]


def test_a_module_is_imported_once_in_each_worker():
    with running(1) as pool:
        first = call(pool, "who")
        assert first[0] != os.getpid()
        assert call(pool, "who") == first


def test_a_child_gets_path_folder_and_named_variables_only(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with running(environment={"GIVEN": "x", "OMP_NUM_THREADS": "2"}) as pool:
        environment, folder, path = call(pool, "surroundings")
    assert environment["GIVEN"] == "x"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert not {"SECRET", "HOME", "PATH"} & set(environment)
    assert folder == str(Path.cwd())
    assert path[0] == str(tmp_path)


def test_printing_neither_disturbs_the_protocol_nor_fills_the_log():
    with running() as pool:
        for _ in range(20):
            assert call(pool, "chatter") == ["", True]
        assert call(pool, "log_bytes") == 0


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("fail", "KeyError"),
        ("leave", "SystemExit"),
        ("no_json", "mega_agentrl.errors.InputError"),
        ("nothing", "mega_agentrl.errors.InputError"),
    ],
)
def test_a_function_that_fails_costs_no_worker(pool, function, expected):
    before = pool.num_replaced
    with pytest.raises(FunctionFailedError) as caught:
        call(pool, function)
    assert caught.value.function == name(function)
    assert caught.value.reason.partition(":")[0] == expected
    assert "Traceback" in caught.value.traceback
    assert pool.num_replaced == before


def test_numpy_values_become_numbers_and_lists(pool):
    assert call(pool, "arrays") == [0.5, 2, True, [0, 1, 2]]


def test_functions_may_use_signals(pool):
    assert call(pool, "alarm") == "rang"


def test_a_fork_that_comes_back_answers_once(pool):
    for _ in range(3):
        assert call(pool, "fork_and_come_back") == "parent"
        assert call(pool, "add", a=5) == 5


def test_a_hanging_call_does_not_hold_the_others(tmp_path):
    with running(2, timeout_s=600.0) as pool:
        hanging = pool.submit(name("sleeper"), {"file": str(tmp_path / "pids")})
        others = [pool.submit(name("add"), {"a": i}) for i in range(20)]
        assert [other.result(WAIT_S) for other in others] == list(range(20))
        assert not hanging.done()


def test_a_hanging_worker_is_killed_and_replaced_and_its_call_runs_once(tmp_path):
    """With all that its function started."""
    file = tmp_path / "pids"
    with running() as pool:
        pool._timeout_s = 2.0
        hanging = pool.submit(name("sleeper"), {"file": str(file)})
        wait_for(lambda: hanging.running())
        with pytest.raises(WorkerTimeoutError) as caught:
            hanging.result(WAIT_S)
        pool._timeout_s = 60.0
        assert (caught.value.function, caught.value.timeout_s) == (name("sleeper"), 2.0)
        assert caught.value.output == "going to sleep"
        pids = [int(pid) for pid in file.read_text().split()]
        assert len(pids) == 3
        assert all(map(is_gone, pids))
        assert pool.num_replaced == 1
        assert call(pool, "add", a=1) == 1


@pytest.mark.parametrize(
    ("function", "exit_code", "output"),
    [("note_and_die", 7, "last words"), ("kill_itself", 128 + signal.SIGKILL, "")],
    ids=["exit", "signal"],
)
def test_a_worker_that_dies_is_replaced_and_its_call_fails(tmp_path, function, exit_code, output):
    notes = tmp_path / "notes"
    arguments = {"file": str(notes), "code": 7} if function == "note_and_die" else {}
    with running() as pool:
        with pytest.raises(WorkerLostError) as caught:
            call(pool, function, **arguments)
        assert (caught.value.exit_code, caught.value.output) == (exit_code, output)
        assert caught.value.may_have_run
        assert call(pool, "add", a=1) == 1
        assert pool.num_replaced == 1
    if arguments:
        assert len(notes.read_text().split()) == 1


def test_a_call_that_found_its_worker_dead_runs_in_another():
    with running() as pool:
        pid, guard, _ = call(pool, "who")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(guard))
        assert call(pool, "add", a=3) == 3
        assert pool.num_replaced == 1


def test_a_killed_guard_takes_its_worker_along():
    with running() as pool:
        pid, guard, _ = call(pool, "who")
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: is_gone(pid))
        assert call(pool, "add", a=3) == 3


def test_no_call_runs_twice_while_workers_are_killed(tmp_path):
    notes = tmp_path / "notes"
    outcomes = {"done": 0, "lost": 0}
    with running(3) as pool:
        futures = [
            pool.submit(name("note_and_work"), {"file": str(notes), "number": i}) for i in range(80)
        ]
        for i, future in enumerate(futures):
            try:
                number, pid = future.result(WAIT_S)
            except WorkerLostError:
                outcomes["lost"] += 1
                continue
            assert number == i
            outcomes["done"] += 1
            if i % 8 == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    ran = notes.read_text().split()
    assert len(ran) == len(set(ran))
    assert outcomes["done"] <= len(ran) <= 80
    assert outcomes["done"] >= 60
    assert pool.num_replaced > 0


def test_close_fails_what_is_open_and_leaves_nothing(tmp_path):
    before, fds = set(child_pids(os.getpid())), len(os.listdir("/proc/self/fd"))
    file = tmp_path / "pids"
    with running(timeout_s=600) as pool:
        open_call = pool.submit(name("sleeper"), {"file": str(file)})
        waiting = pool.submit(name("add"), {"a": 1})
        cancelled = pool.submit(name("add"), {"a": 1})
        assert cancelled.cancel()
        wait_for(lambda: file.exists() and len(file.read_text().split()) == 3)
        pool.close()
        for future in (open_call, waiting):
            with pytest.raises(PoolClosedError):
                future.result(WAIT_S)
        with pytest.raises(CancelledError):
            cancelled.result(WAIT_S)
        with pytest.raises(PoolClosedError):
            pool.submit(name("add"), {"a": 1})
    assert all(is_gone(int(pid)) for pid in file.read_text().split())
    assert set(child_pids(os.getpid())) <= before
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert not [thread for thread in threading.enumerate() if thread in pool._threads]


OWNER = """
import os, sys, time
from mega_agentrl.sandbox.worker_pool import WorkerPool
pool = WorkerPool(2, 600.0)
pool.start()
if sys.argv[1] == "kill forked" and os.fork() == 0:  # keeps the owner's descriptors open
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(600)
for file in sys.argv[3:]:
    pool.submit("tests.sandbox.worker_functions:sleeper", {"file": file})
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["kill", "kill forked", "exit"])
def test_the_pool_dies_with_its_owner(tmp_path, end):
    fork, files = tmp_path / "fork", [tmp_path / "one", tmp_path / "two"]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, end, str(fork), *map(str, files)],
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        wait_for(
            lambda: all(file.exists() and len(file.read_text().split()) == 3 for file in files)
        )
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert not any(is_gone(pid) for pid in pids)
        if end != "exit":
            owner.kill()
        owner.stdin.close()  # without a close of the pool
        owner.wait(WAIT_S)
        wait_for(lambda: all(is_gone(pid) for pid in pids))
    finally:
        if fork.exists():
            os.kill(int(fork.read_text()), signal.SIGKILL)
        owner.kill()
        owner.wait(WAIT_S)


def test_warm_up_runs_in_every_worker_and_the_replacement(tmp_path):
    notes = tmp_path / "notes"
    warm = make_worker_call(name("note_and_sleep"), {"file": str(notes), "sleep_s": 0})
    with running(2, warm_up=[warm]) as pool:
        assert len(set(notes.read_text().split())) == 2
        with pytest.raises(WorkerLostError):
            call(pool, "kill_itself")
        wait_for(lambda: len(set(notes.read_text().split())) == 3)


def test_a_pool_whose_warm_up_fails_does_not_start():
    before = set(child_pids(os.getpid()))
    warm_up = [make_worker_call(name("add"), {"a": 1}), make_worker_call(name("fail"), {})]
    pool = WorkerPool(2, 1.0, warm_up=warm_up)
    with pytest.raises(ValueError) as caught:
        pool.start()
    assert isinstance(caught.value.__cause__, FunctionFailedError)
    assert caught.value.__cause__.function == name("fail")
    assert set(child_pids(os.getpid())) <= before


def test_a_worker_that_does_not_come_up_in_time():
    slow = make_worker_call(name("note_and_sleep"), {"file": os.devnull, "sleep_s": 600})
    pool = WorkerPool(1, 1.0, warm_up=[slow], start_timeout_s=1.0)
    # On a slow machine the interpreter itself, or the import, is what does not come up in time.
    with pytest.raises(ValueError) as caught:
        pool.start()
    assert isinstance(caught.value.__cause__, WorkerTimeoutError)
    assert caught.value.__cause__.timeout_s == 1.0


def test_invalid_arguments_and_a_pool_that_is_not_started_are_refused():
    for num_workers, timeout_s, argument in ((0, 1.0, "num_workers"), (1, 0.0, "timeout_s")):
        with pytest.raises(InputError) as caught:
            WorkerPool(num_workers, timeout_s)
        assert (caught.value.name, caught.value.got) == (argument, 0)
    with pytest.raises(RuntimeError):
        WorkerPool(1, 1.0).submit(name("add"), {"a": 1})
    with pytest.raises(InputError) as caught:
        make_worker_call("x:y", {"a": object()})
    assert caught.value.name == "arguments of x:y"
    unused = WorkerPool(1, 1.0)
    unused.close()
    unused.close()
