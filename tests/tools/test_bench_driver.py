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
    done = bench("--rows", "32", "--tokens", "64", "--share", "1")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [
        "seconds/advantages",
        "seconds/ares",
        "seconds/together",
        "seconds/corrections",
        "memory/together",
    ]
    for line in lines:
        assert list(line) == ["bench", "case", "unit", "ours", "baseline", "ratio"]
    together = lines[2]
    assert together["ours"] == pytest.approx(lines[0]["ours"] + lines[1]["ours"], abs=0.002)


def test_an_unknown_case_lists_those_there_are():
    done = bench("--cases", "speed/*")
    assert done.returncode == 2
    assert "seconds/ares" in done.stderr
