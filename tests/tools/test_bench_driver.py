"""The driver's benchmark: its lines, and that ours and the baseline agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import bench_driver


def test_every_case_prints_a_line():
    # In a process of its own: the peak of its memory counts.
    sizes = ("--rows", "32", "--tokens", "256", "--share", "1")
    done = subprocess.run(
        [sys.executable, str(Path(bench_driver.__file__)), *sizes],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
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


def test_an_unknown_case_lists_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_driver.py", "--cases", "speed/*"])
    with pytest.raises(SystemExit) as ended:
        bench_driver.main()
    assert ended.value.code == 2
    assert "seconds/ares" in capsys.readouterr().err
