"""Code run by us and by a real `python -c`: exit code, stdout and stderr are the same."""

import os
import subprocess
import sys

import pytest

from mega_agentrl.sandbox.guest.execute import EXIT_FLUSH_FAILED

OURS = (
    "import sys; code = sys.argv[1]\n"
    "from mega_agentrl.sandbox.guest.execute import new_main_module, run_to_exit\n"
    "import os; del sys.path[0]; status = run_to_exit(new_main_module(), code); os._exit(status)"
)
SESSION = (
    "import sys; codes = sys.argv[1:]\n"
    "from mega_agentrl.sandbox.guest.execute import flush_output, new_main_module, run_code\n"
    "module = new_main_module()\n"
    "for code in codes:\n"
    "    status = run_code(module, code); print('=', flush_output() or status, flush=True)"
)
ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))


def ended(script, *arguments, stdout=subprocess.PIPE):
    command = [sys.executable, "-B", "-c", script, *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=30, cwd=ROOT, env={}
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
    "thread of a thread": (
        "import threading, time\n"
        "def last(): time.sleep(0.1); print('last', flush=True)\n"
        "def late(): time.sleep(0.1); threading.Thread(target=last).start()\n"
        "threading.Thread(target=late).start()"
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
def test_as_python_itself(name):
    assert ended(OURS, SAME[name]) == ended(SAME[name])


@pytest.mark.parametrize("redirect", ["", "sys.stdout = sys.stderr = open('/dev/full', 'w'); "])
def test_a_full_disk_is_told_by_the_code(redirect):
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
