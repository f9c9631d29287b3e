"""Functions that the worker tests call in other processes."""

import fractions
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

IMPORTED_AT = time.monotonic_ns()


def add(a, b=0):
    return a + b


def who():
    return [os.getpid(), os.getppid(), IMPORTED_AT]


def surroundings():
    return [dict(os.environ), str(Path.cwd()), sys.path]


def note(file, number):
    with Path(file).open("a") as lines:
        lines.write(f"{number}\n")


def note_and_sleep(file, sleep_s):
    note(file, os.getpid())
    print("going to sleep")
    time.sleep(sleep_s)
    return "slept"


def note_and_die(file, code):
    note(file, os.getpid())
    print("last words")
    os._exit(code)


def note_and_work(file, number):
    note(file, number)
    time.sleep(0.005)
    return [number, os.getpid()]


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def chatter():
    print("{" * 100_000)
    print("}" * 100_000, file=sys.stderr)
    os.write(1, b"\0\0\0\2{}")
    return [sys.stdin.read(), os.fstat(1).st_ino == os.fstat(2).st_ino]


def log_bytes():
    return os.fstat(2).st_size


def fail():
    raise KeyError("wrong")


def leave():
    sys.exit(3)


def no_json():
    return fractions.Fraction(1, 2)


def arrays():
    import numpy as np

    return [np.float32(0.5), np.int64(2), np.bool_(True), np.arange(3)]


def fork_and_come_back():
    return "parent" if os.fork() else "child"


def alarm():
    def ring(number, frame):
        raise TimeoutError("rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError as error:
        return str(error)
    return "slept"


def sleeper(file):
    """Starts a process in a session of its own, whose parent ends, and hangs."""
    command = ["/bin/sh", "-c", "/usr/bin/setsid /bin/sleep 600 >/dev/null & echo $!"]
    orphan = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    Path(file).write_text(f"{os.getpid()} {os.getppid()} {orphan}")
    print("going to sleep")
    time.sleep(600)
