"""`tools/show_tree.py`: trees and entropies of a file that a run left, as a person reads them."""

import subprocess
import sys

import pytest

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.io.render import render_tree
from mega_agentrl.rollout.io.tree_file import write_trees
from tests.rollout.grown_trees import grow, nested_tree
from tools import show_tree


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.jsonl"
    write_trees(path, [nested_tree()], stage="rl", step=3)
    return path


def test_all_trees_of_a_file_are_printed(file, capsys):
    assert show_tree.main([str(file)]) == 0
    assert capsys.readouterr().out == f"{render_tree(nested_tree())}\n\n"


def test_one_prompt_is_chosen_by_its_id(tmp_path, capsys):
    trees = grow(RolloutConfig(group_size=2), num_prompts=3)
    path = tmp_path / "step.jsonl"
    write_trees(path, trees, stage="rl", step=1)
    assert show_tree.main([str(path), "--prompt", "set/1"]) == 0
    assert capsys.readouterr().out == f"{render_tree(trees[1])}\n\n"
    assert show_tree.main([str(path), "--prompt", "set/9"]) == 2
    assert "set/0, set/1, set/2" in capsys.readouterr().err


def test_entropies_are_shown_by_offset(file, capsys):
    assert show_tree.main([str(file), "--entropy"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("offset") and len(rows) == 51
    assert rows[0].split() == ["0", "1.0000", "(1)", "2.0000", "(6)"]
    assert rows[50].split() == ["50", "-", "(0)", "-", "(0)"]


def test_a_reader_that_stops_early_is_no_error(file):
    command = f"set -o pipefail; {sys.executable} {show_tree.__file__} {file} | head -1"
    write_trees(file, [nested_tree()] * 400, stage="rl", step=3)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "question set/0: Q\n"


def test_a_foreign_or_missing_file_is_refused(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    for missing_or_foreign in (path, tmp_path / "none"):
        assert show_tree.main([str(missing_or_foreign)]) == 2
        assert str(missing_or_foreign) in capsys.readouterr().err
