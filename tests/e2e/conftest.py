"""Whole runs as a user starts them: `python -m mega_agentrl` in a process of its own."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.metric_lines import metric_lines

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, cwd=ROOT, program=("-m", "mega_agentrl")):
    """The command line, or another `program`, as a child in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
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


def finish_training(child, run_dir, num_steps, timeout_s=480):
    """The metrics of a run whose every step trains; past the deadline it is ended."""
    code, output = finish(child, timeout_s)
    assert code == 0, output[-3000:]
    lines = metric_lines(run_dir, "rl")
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    for line in lines:
        assert math.isfinite(line["actor/loss"]) and line["actor/grad_norm"] > 0
        assert line["actor/num_tokens"] > 0 and line["actor/num_skipped_steps"] == 0
    return lines


def processes_of(child, marker):
    """Living processes below `child`, and those whose environment names `marker`.

    Neither alone finds all: a process whose parent has died is not below any more, and one that
    has set its title, as vLLM's do, may have overwritten its environment with it.
    """
    found = {process for process in psutil.process_iter() if names(process, marker)}
    if child.poll() is None:
        found.update(psutil.Process(child.pid).children(recursive=True))
    return {process for process in found if is_alive(process)}


def names(process, marker):
    try:
        return marker in Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return False


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition, timeout_s):
    """Seconds until `condition()` holds; fails past the deadline."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            pytest.fail(f"not reached within {timeout_s} s: {condition.__doc__ or condition}")
        time.sleep(0.2)
    return time.monotonic() - start_s
