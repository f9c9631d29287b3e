"""An interpreter from inside: limits, folders, descriptors, and what the code cannot break."""

import json
import os
import subprocess
import sys
import time

import pytest

from mega_agentrl.sandbox.guest.interpreter import EXIT_FLUSH_FAILED
from tests.sandbox.guest.guest_program import begin, done, forked, output, program, run

LIMITS = {
    "memory_mib": 128,
    "cpu_limit_s": 7.0,
    "num_processes": 9,
    "num_open_files": 40,
    "max_file_mib": 3,
    "tmpfs_mib": 5,
    "num_inodes": 100,
}
MIB = 1 << 20

LOOK = """
import json, os, resource, signal
fields = dict(line.split(':', 1) for line in open('/proc/self/status'))
names = ('FSIZE', 'NOFILE', 'CORE', 'CPU', 'NPROC')
room = {f: os.statvfs(f) for f in ('/tmp', '/dev/shm')}
print(json.dumps({
    'pid': os.getpid(), 'session': os.getsid(0), 'cwd': os.getcwd(),
    'others': [n for n in os.listdir('/proc') if n.isdigit()],
    'soft': {n: resource.getrlimit(getattr(resource, 'RLIMIT_' + n))[0] for n in names},
    'powers': [int(fields['Cap' + n], 16) for n in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb')],
    'no_new': int(fields['NoNewPrivs']), 'seccomp': int(fields['Seccomp']),
    'oom': open('/proc/self/oom_score_adj').read().strip(),
    'mode': oct(os.stat('/tmp').st_mode), 'left': os.listdir('/tmp') + os.listdir('/dev/shm'),
    'bytes': [one.f_blocks * one.f_frsize for one in room.values()],
    'inodes': [one.f_files for one in room.values()],
    'fds': sorted(int(n) for n in os.listdir('/proc/self/fd')),
    'child_signal': signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
}))
"""


@pytest.fixture(scope="module")
def stateless():
    with program(preload_modules=("numpy",), **LIMITS) as one:
        yield one


@pytest.fixture(scope="module")
def stateful():
    with program(stateful=True, **LIMITS) as one:
        yield one


def check(facts):
    """CPU: a second more, which the supervisor's own count comes before."""
    assert (facts["pid"], facts["session"], facts["others"]) == (1, 1, ["1"])
    soft = {"FSIZE": 3 * MIB, "NOFILE": 40, "CORE": 0, "CPU": 8, "NPROC": 9}
    assert facts["soft"] == soft
    assert facts["powers"] == [0] * 5
    assert (facts["no_new"], facts["seccomp"], facts["oom"]) == (1, 2, "900")
    assert (facts["cwd"], facts["mode"], facts["left"]) == ("/tmp", "0o40700", [])
    assert facts["bytes"] == [5 * MIB] * 2
    assert facts["inodes"] == [100] * 2
    assert facts["child_signal"]
    # Three streams, the folder being listed, and the channel, out of the way.
    assert facts["fds"] == [0, 1, 2, 3, 40 + 16]


@pytest.mark.parametrize("is_fork", [False, True], ids=["first", "fork"])
def test_a_session_and_its_forks_have_their_limits(session, is_fork):
    if is_fork:
        child = forked(session)
        check(json.loads(output(child, LOOK)))
        child.close()
    check(json.loads(output(session, LOOK)))


def test_a_call_has_its_limits(stateless):
    check(json.loads(output(stateless.main, LOOK)))


def test_memory_is_beyond_the_warm_interpreters(stateless):
    code = (
        "import resource\n"
        "warm = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "print((resource.getrlimit(resource.RLIMIT_AS)[0] - warm) >> 20)\n"
        "try: bytearray(200 << 20)\nexcept MemoryError: print('no')\nbytearray(64 << 20)"
    )
    room, said = output(stateless.main, code).split()
    assert 96 <= int(room) <= 128
    assert said == "no"


def test_random_numbers_differ_from_call_to_call(stateless):
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (output(stateless.main, code).split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_forked_child_that_comes_to_its_end_says_nothing(stateless, session):
    code = "import os, sys, time\npid = os.fork()\nif pid: os.wait(); print('parent')\nelse: 1 / 0"
    for channel in (stateless.main, session):
        answer = run(channel, code)
        assert (answer["code"], answer["stdout"]) == (0, "parent\n")
        assert answer["stderr"].count("ZeroDivisionError") == 1
    assert output(session, "print(pid > 0)") == "True"


def test_a_lowered_limit_of_files_stays_and_a_fork_works(session):
    code = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (6, resource.getrlimit(7)[1]))\nfiles = []\n"
        "try:\n    while True: files.append(os.dup(0))\nexcept OSError: print(len(files) < 6)"
    )
    assert output(session, code) == "True"
    child = forked(session)
    for one in (session, child):
        assert output(one, "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])") == "6"
    child.close()


def test_closing_every_descriptor_loses_only_the_output(session):
    run(session, "x = 1")
    assert run(session, "import os; os.closerange(0, 40)")["alive"]
    answer = run(session, "x += 1; open('note', 'w').write(str(x))")
    assert (answer["alive"], answer["state_lost"]) == (True, False)


def test_an_alarm_between_calls_is_that_of_the_next(session):
    run(
        session,
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1); x = 7",
    )
    begin(session, "time.sleep(0.3); print(x)", number=1)
    answer = done(session)
    assert answer["alive"]
    assert "ZeroDivisionError" in answer["stderr"]
    assert output(session, "print(x)") == "7"


def test_an_alarm_that_fires_while_stopped_loses_nothing(session):
    run(
        session,
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05); x = 7",
    )
    time.sleep(0.2)
    answer = run(session, "print(x)")
    assert (answer["stdout"], answer["alive"]) == ("7\n", True)


def test_a_fork_starts_in_the_working_folder_or_in_tmp_if_it_is_gone(session):
    run(session, "import os; os.mkdir('/tmp/a'); os.chdir('/tmp/a'); os.mkdir('/tmp/a/b')")
    child = forked(session)
    assert output(child, "print(os.getcwd())") == "/tmp/a"
    run(child, "os.chdir('/tmp/a/b'); os.rmdir('/tmp/a/b')")
    grandchild = forked(child)
    assert output(grandchild, "print(os.getcwd())") == "/tmp"
    grandchild.close()
    child.close()


OURS = (
    "import sys; code = sys.argv[1]\n"
    "from mega_agentrl.sandbox.guest.interpreter import new_main_module, run_to_exit\n"
    "import os; del sys.path[0]; status = run_to_exit(new_main_module(), code); os._exit(status)"
)
SESSION = (
    "import sys; codes = sys.argv[1:]\n"
    "from mega_agentrl.sandbox.guest.interpreter import flush_output, new_main_module, run_code\n"
    "module = new_main_module()\n"
    "for code in codes:\n"
    "    status = run_code(module, code); print('=', flush_output() or status, flush=True)"
)
ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))


def ended(script, *arguments, stdout=subprocess.PIPE):
    command = [sys.executable, "-B", "-c", script, *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, env={}
    )
    return done.returncode, done.stdout, done.stderr


SAME = {
    "prints": "import sys; print(1); print(2, file=sys.stderr)",
    "is main": "import sys; print(__name__, sys.argv, sys.path[0] == '', __doc__, __package__)",
    "is found as main": "x = 3; import __main__; print(__main__.x, __main__.__dict__ is globals())",
    "annotations": "def f(x: int) -> list[str]: pass\nprint(f.__annotations__)",
    "exit": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit true": "raise SystemExit(True)",
    "exit 256": "raise SystemExit(256)",
    "exit -1": "raise SystemExit(-1)",
    "exit text": "raise SystemExit('no more')",
    "exit float": "raise SystemExit(2.5)",
    "exit tuple": "raise SystemExit(1, 2)",
    "raises": "def f(x):\n    return 1 / x\nf(0)",
    "raises from": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('v') from e",
    "raises while": "try:\n    {}['k']\nexcept KeyError:\n    int('v')",
    "group": "raise ExceptionGroup('g', [ValueError(1), KeyError('k')])",
    "syntax": "x = (1,\ny = 2",
    "indent": "  x = 1",
    "null": "eval('1\\0')",
    "thread": (
        "import threading, time\n"
        "def late(): time.sleep(0.1); print('late', flush=True)\n"
        "threading.Thread(target=late).start(); print('main', flush=True); raise SystemExit(4)"
    ),
    "thread raises": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "daemon": (
        "import threading, time\n"
        "threading.Thread(target=lambda: time.sleep(60), daemon=True).start(); print(1)"
    ),
    "executor left open": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2); print(pool.submit(pow, 2, 3).result())"
    ),
    "atexit": (
        "import atexit, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "atexit.register(print, 'first'); atexit.register(print, 'second'); 1 / 0"
    ),
    "stdout gone": "import sys; print(1); sys.stdout.flush(); sys.stdout = None",
    "stdout closed": "import sys; print(1); sys.stdout.close()",
    "stdout deleted": "import sys; print(1); sys.stdout.flush(); del sys.stdout",
}


@pytest.mark.parametrize("name", SAME)
def test_code_ends_as_in_python_itself(name):
    assert ended(OURS, SAME[name]) == ended(SAME[name])


def test_a_thread_can_start_another_after_the_code_has_ended():
    """The first releases of Python 3.12 refuse this themselves."""
    code = (
        "import threading, time\n"
        "def last(): time.sleep(0.1); print('last', flush=True)\n"
        "def late(): time.sleep(0.1); threading.Thread(target=last).start()\n"
        "threading.Thread(target=late).start()"
    )
    assert ended(OURS, code) == (0, "last\n", "")


@pytest.mark.parametrize("kind", ["stateless", "stateful"])
def test_a_traceback_shows_no_lines_of_other_programs(request, kind):
    """Python 3.13 keeps the text of `python -c`, under the name that the policy's code has."""
    one = request.getfixturevalue(kind)
    channel = one.open_session() if kind == "stateful" else one.main
    answer = run(channel, "1 / 0")
    assert answer["stderr"] == (
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
        "ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize("redirect", ["", "sys.stdout = sys.stderr = open('/dev/full', 'w'); "])
def test_a_full_disk_gives_the_exit_code_of_python(redirect):
    code = f"import sys; {redirect}print(1)"
    with open("/dev/full", "w", encoding="ascii") as full:
        real, ours = ended(code, stdout=full)[0], ended(OURS, code, stdout=full)[0]
    assert real == ours == EXIT_FLUSH_FAILED


OWN_STREAM = "class Own:\n    def write(self, text): 1 / 0\n    flush = isatty = write\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.stdout = 42", EXIT_FLUSH_FAILED),
        ("import io, sys; sys.stdout = io.StringIO()", 0),
        (f"{OWN_STREAM}import sys; sys.stdout = Own()", EXIT_FLUSH_FAILED),
        (f"{OWN_STREAM}import sys; sys.stderr = Own(); 1 / 0", EXIT_FLUSH_FAILED),
        (f"{OWN_STREAM}import sys; sys.stderr = Own(); sys.exit('text')", EXIT_FLUSH_FAILED),
        ("import sys; sys.stderr.close(); 1 / 0", 1),
        ("import sys; del sys.stderr; sys.exit('text')", 1),
    ],
)
def test_streams_and_errors_of_the_codes_own_never_break_us(code, status):
    assert ended(OURS, code) == (status, "", "")


def test_an_interrupt_is_the_codes_own_error():
    status, _, error = ended(OURS, "raise KeyboardInterrupt")
    assert status == 1
    assert error.endswith("KeyboardInterrupt\n")


def test_cells_of_a_notebook_share_one_module():
    status, out, error = ended(
        SESSION, "x: int = 1", "def f(): return x", "x += 1; 1 / 0", "print(f())", "exit(5)", "y"
    )
    assert status == 0
    assert out.split("\n") == ["= 0", "= 0", "= 1", "2", "= 0", "= 5", "= 1", ""]
    assert "ZeroDivisionError" in error
    assert error.endswith("NameError: name 'y' is not defined\n")
