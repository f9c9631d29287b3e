from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("export_hf", ROOT / "tools/export_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_without_a_checkpoint_is_an_error_message(tool, tmp_path, capsys):
    code = tool.main([str(tmp_path), "--model", str(tmp_path), "--out", str(tmp_path / "hf")])
    assert code == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_the_newest_checkpoint_of_a_run_is_taken(tool, tmp_path, capsys, monkeypatch):
    taken = []
    monkeypatch.setattr(tool, "latest_checkpoint", lambda folder: folder / "step_7")
    monkeypatch.setattr(tool, "_write", lambda *arguments: taken.append(arguments))
    arguments = [str(tmp_path), "--model", "m", "--out", "o", "--dtype", "float32"]
    assert tool.main(arguments) == 0
    assert taken == [(tmp_path / "step_7", Path("m"), Path("o"), "float32")]
    (tmp_path / "manifest.json").write_text("{}")
    assert tool.main(arguments) == 0
    assert taken[1][0] == tmp_path
    assert "written from" in capsys.readouterr().out
