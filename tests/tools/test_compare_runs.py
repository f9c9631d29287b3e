"""`tools/compare_runs.py` compares any runs, and refuses a folder without one."""

import json

from tools.compare_runs import main


def test_any_runs_can_be_compared(tmp_path, capsys):
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
    folders = [str(tmp_path / name) for name in ("one", "two", "out")]
    assert main([*folders[:2], "--out", folders[2]]) == 0
    said = capsys.readouterr().out
    assert "| optim.lr=0.1 | 1 | 0.100 | 1.100 | 0.100 | 0.100 | - | - | 0 | 0 | 1.0 |" in said
    assert "| optim.lr=0.2 | 1 | 0.200 | 1.200 | 0.200 | 0.200 | - | - | 0 | 0 | 1.0 |" in said
    kinds = {"comparison.md", "comparison.json", "comparison.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kinds


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
