"""Triton's interpreter, which must be switched on before a kernel is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_in_interpreter(script, *arguments):
    """Run a script below the root on a CPU with Triton's interpreter; return its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
