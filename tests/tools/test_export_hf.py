"""`tools/export_hf.py`: which checkpoint is exported, and that errors end with code 2."""

from pathlib import Path

from tools import export_hf


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, capsys):
    folders = [str(tmp_path), "--model", str(tmp_path), "--out", str(tmp_path / "hf")]
    assert export_hf.main(folders) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_the_newest_checkpoint_of_a_run_is_exported(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(export_hf, "latest_checkpoint", lambda folder: folder / "step_7")
    monkeypatch.setattr(export_hf, "_write", lambda *arguments: taken.append(arguments))
    arguments = [str(tmp_path), "--model", "m", "--out", "o", "--dtype", "float32"]
    assert export_hf.main(arguments) == 0
    assert taken == [(tmp_path / "checkpoints" / "step_7", Path("m"), Path("o"), "float32")]
    (tmp_path / "manifest.json").write_text("{}")
    assert export_hf.main(arguments) == 0
    assert taken[1][0] == tmp_path
