"""The command that makes a sweep's table again."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compare(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_any_runs_can_be_compared(tmp_path):
    for name, lr in (("one", 0.1), ("two", 0.2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"seed: 1\nrun_dir: {name}\noptim:\n  lr: {lr}\n")
        (folder / "summary.json").write_text(json.dumps({"train_seconds": 60.0}))
        marks = [
            {"stage": f"held_out_{k}", "step": k, "sampled/reward": lr + k, "sampled/success": lr}
            for k in range(2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in marks))
    done = compare(tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "| optim.lr=0.1 | 1 | 0.100 | 1.100 | 0.100 | 0 | 0 | 1.0 |" in done.stdout
    assert "| optim.lr=0.2 | 1 | 0.200 | 1.200 | 0.200 | 0 | 0 | 1.0 |" in done.stdout
    kinds = {"comparison.md", "comparison.json", "comparison.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kinds


def test_a_folder_without_runs_is_refused(tmp_path):
    done = compare(tmp_path)
    assert done.returncode == 2
    assert "there is no run in it" in done.stderr
