"""Whole runs as a user starts them: `python -m mega_agentrl` in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, cwd=ROOT):
    """The command line as a child in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mega_agentrl", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(child, timeout_s):
    """Exit code and output; past the deadline it and its children are ended."""
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        pytest.fail(f"no end within {timeout_s} s; output so far:\n{output[-3000:]}")
    return child.returncode, output


def processes_below(marker):
    """Command lines of living processes whose environment names `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if marker.encode() in environment and command:
            found.append(command)
    return found


def wait_until(condition, timeout_s):
    """Seconds until `condition()` holds; fails past the deadline."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            pytest.fail(f"not reached within {timeout_s} s: {condition.__doc__ or condition}")
        time.sleep(0.2)
    return time.monotonic() - start_s
