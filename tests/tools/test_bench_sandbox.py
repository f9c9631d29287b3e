from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_sandbox import check_equal, main, percentile, snippets

ROOT = Path(__file__).parents[2]
KEYS = ["bench", "case", "unit", "ours", "baseline", "ratio"]


def bench(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_sandbox.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_one_line_a_case_and_both_sides_print_the_same():
    # comparing both sides' answers is part of the cases
    names = ["p50/plain", "p99/numpy", "stateful/p50", "fork/p99", "memory/session"]
    done = bench("--calls", "12", "--cases", ",".join(names))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(line) for line in lines] == [KEYS] * len(names)
    assert [line["case"] for line in lines] == names
    assert [line["unit"] for line in lines] == ["s", "s", "s", "s", "MiB"]
    for line in lines:
        assert line["bench"] == "sandbox"
        assert line["ratio"] == pytest.approx(line["baseline"] / line["ours"], rel=0.05)


def test_a_pattern_that_fits_nothing_lists_the_cases(capsys):
    assert main(["--cases", "p50/java"]) == 2
    said = capsys.readouterr()
    assert "stateful/p99" in said.err
    assert said.out == ""


def test_a_third_is_plain_a_third_numpy_and_no_two_are_the_same():
    codes = snippets("mix", 12)
    for word, share in (("np.", 4), ("sympy", 2), ("pandas", 2), ("total", 4)):
        assert sum(word in code for code in codes) == share
    assert len(set(codes)) == 12


def test_percentiles_are_values_that_were_measured():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100.0, 198.0)
    assert percentile([5.0], 0.99) == 5.0


def test_answers_that_differ_end_the_bench():
    check_equal(["1", "2", "3"], ["1", "2"])
    with pytest.raises(RuntimeError, match="call 1: ours printed '5', the baseline '2'"):
        check_equal(["1", "5"], ["1", "2"])
