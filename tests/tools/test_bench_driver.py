"""The driver's benchmark: its lines, and that ours and the baseline agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_driver.py"


def bench(*arguments):
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_case_prints_a_line():
    done = bench("--rows", "32", "--tokens", "256", "--share", "1")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [
        "seconds/advantages",
        "seconds/ares",
        "seconds/corrections",
        "seconds/together",
        "memory/together",
    ]
    for line in lines:
        assert list(line) == ["bench", "case", "unit", "ours", "baseline", "ratio"]
    total = sum(line["ours"] for line in lines[:3])
    assert lines[3]["ours"] == pytest.approx(total, abs=0.003)


def test_an_unknown_case_lists_those_there_are():
    done = bench("--cases", "speed/*")
    assert done.returncode == 2
    assert "seconds/ares" in done.stderr
