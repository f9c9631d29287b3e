"""`tools/make_tiny_model.py` writes the folder once, and refuses settings it cannot meet."""

from tools import make_tiny_model

SIZES = ["--num-train=9", "--num-dev=3", "--num-validation=3", "--num-demonstrations=20"]


def test_the_second_run_does_nothing_and_another_seed_rewrites(tmp_path, capsys):
    run = ["--out", str(tmp_path), *SIZES]
    assert make_tiny_model.main(run) == 0
    assert capsys.readouterr().out.endswith(": written\n")
    corpus = tmp_path / "corpus.jsonl"
    before = corpus.stat().st_mtime_ns, corpus.read_bytes()
    assert make_tiny_model.main(run) == 0
    assert capsys.readouterr().out.endswith(": up to date\n")
    assert (corpus.stat().st_mtime_ns, corpus.read_bytes()) == before
    assert make_tiny_model.main([*run, "--seed", "1"]) == 0
    assert corpus.read_bytes() != before[1]


def test_settings_that_cannot_be_met_end_with_code_2(tmp_path, capsys):
    assert make_tiny_model.main(["--out", str(tmp_path), "--num-validation", "99999"]) == 2
    assert "num_questions: got 99999" in capsys.readouterr().err
    assert make_tiny_model.main(["--out", str(tmp_path), "--num-train", "0"]) == 2
    assert "num_train: got 0" in capsys.readouterr().err


def test_the_task_of_function_calls_has_its_own_requests(tmp_path, capsys):
    run = ["--out", str(tmp_path), "--task", "calls", *SIZES]
    assert make_tiny_model.main(run) == 0
    assert capsys.readouterr().out.endswith(": written\n")
    assert {path.name for path in tmp_path.iterdir()} >= {"train.parquet", "model", "stamp.json"}
    assert make_tiny_model.main(run) == 0
    assert capsys.readouterr().out.endswith(": up to date\n")
    assert make_tiny_model.main(["--out", str(tmp_path), *SIZES]) == 0
    assert (tmp_path / "corpus.jsonl").is_file(), "another task replaces the folder"
