"""`tools/report.py`: the page of a run folder from the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mega_agentrl.rollout.io.tree_file import write_trees
from tests.rollout.grown_trees import nested_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("report", ROOT / "tools/report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_dir(tmp_path):
    write_trees(tmp_path / "rollouts/step_000001.jsonl", [nested_tree()], stage="rl", step=1)
    return tmp_path


def test_a_page_where_it_was_asked_for(tool, run_dir, capsys):
    assert tool.main([str(run_dir), "--out", str(run_dir / "page.html")]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'page.html'}\n"
    assert 'id="tree-0"' in (run_dir / "page.html").read_text()


def test_a_part_of_the_trees_fits_into_a_megabyte(tool, run_dir):
    trees = [nested_tree()] * 400
    write_trees(run_dir / "rollouts/step_000002.jsonl", trees, stage="rl", step=2)
    assert tool.main([str(run_dir), "--megabytes", "1"]) == 0
    size = (run_dir / "report.html").stat().st_size
    assert 500_000 < size < 1_200_000


def test_no_tree_fits_into_nothing(tool, run_dir):
    assert tool.main([str(run_dir), "--megabytes", "0"]) == 0
    assert 'id="tree-0"' not in (run_dir / "report.html").read_text()


def test_a_folder_that_is_none_of_a_run(tool, tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no metrics.jsonl")
