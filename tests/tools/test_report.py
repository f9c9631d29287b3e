"""`tools/report.py`: the page of a run folder from the command line."""

import pytest

from mega_agentrl.rollout.io.tree_file import write_trees
from tests.rollout.grown_trees import nested_tree
from tools import report


@pytest.fixture
def run_dir(tmp_path):
    write_trees(tmp_path / "rollouts/step_000001.jsonl", [nested_tree()], stage="rl", step=1)
    return tmp_path


def test_the_page_is_written_to_the_given_file(run_dir, capsys):
    assert report.main([str(run_dir), "--out", str(run_dir / "page.html")]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'page.html'}\n"
    assert 'id="tree-0"' in (run_dir / "page.html").read_text()


def test_the_page_has_as_many_trees_as_fit_into_its_limit(run_dir):
    trees = [nested_tree()] * 400
    write_trees(run_dir / "rollouts/step_000002.jsonl", trees, stage="rl", step=2)
    assert report.main([str(run_dir), "--megabytes", "1"]) == 0
    size = (run_dir / "report.html").stat().st_size
    assert 500_000 < size < 1_200_000
    assert report.main([str(run_dir), "--megabytes", "0"]) == 0
    assert 'id="tree-0"' not in (run_dir / "report.html").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
