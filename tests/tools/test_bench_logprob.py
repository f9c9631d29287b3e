from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_logprob import main

ROOT = Path(__file__).parents[2]
KEYS = ["bench", "case", "unit", "ours", "baseline", "ratio"]


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bench_logprob.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_each_kind_prints_one_line_and_both_paths_agree():
    names = ["memory/T2048/TP1", "forward_backward/T2048/TP2"]
    # comparing both paths' outputs is part of the timed cases
    done = bench("--vocab", "256", "--repeats", "1", "--cases", ",".join(names))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 2
    assert [line["case"] for line in lines] == names
    assert [line["unit"] for line in lines] == ["MiB", "s"]
    for line in lines:
        assert line["bench"] == "logprob"
        assert line["ratio"] == pytest.approx(line["baseline"] / line["ours"], rel=0.05)


def test_a_pattern_that_fits_nothing_lists_the_cases(capsys):
    assert main(["--cases", "memory/T1/TP1"]) == 2
    said = capsys.readouterr()
    assert "forward_backward/T4096/TP2/H4096" in said.err
    assert said.out == ""
