"""An earlier run is never overwritten and never mixed with the new one."""

from mega_agentrl.train.run_folder import make_room


def test_earlier_runs_are_numbered_and_kept(tmp_path):
    run_dir = tmp_path / "deep" / "run"
    assert make_room(run_dir) is None
    for number in (1, 2):
        (run_dir / "metrics.jsonl").write_text(f"run {number}")
        assert make_room(run_dir) == tmp_path / "deep" / f"run.{number}"
        assert not list(run_dir.iterdir())
    kept = [(tmp_path / "deep" / f"run.{n}" / "metrics.jsonl").read_text() for n in (1, 2)]
    assert kept == ["run 1", "run 2"]


def test_a_folder_without_a_run_stays(tmp_path):
    (tmp_path / "multirun.yaml").write_text("x")
    assert make_room(tmp_path) is None
    assert (tmp_path / "multirun.yaml").exists()
