"""`tools/show_tree.py`: trees and entropies of a file that a run left, as a person reads them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.rollout.io.render import render_tree
from mega_agentrl.rollout.io.tree_file import write_trees
from tests.rollout.grown_trees import grow, nested_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("show_tree", ROOT / "tools/show_tree.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.jsonl"
    write_trees(path, [nested_tree()], stage="rl", step=3)
    return path


def test_all_trees_of_a_file(tool, file, capsys):
    assert tool.main([str(file)]) == 0
    assert capsys.readouterr().out == f"{render_tree(nested_tree())}\n\n"


def test_one_prompt_by_its_id(tool, tmp_path, capsys):
    from mega_agentrl.config.sections.rollout import RolloutConfig

    trees = grow(RolloutConfig(group_size=2), num_prompts=3)
    path = tmp_path / "step.jsonl"
    write_trees(path, trees, stage="rl", step=1)
    assert tool.main([str(path), "--prompt", "set/1"]) == 0
    assert capsys.readouterr().out == f"{render_tree(trees[1])}\n\n"
    assert tool.main([str(path), "--prompt", "set/9"]) == 2
    assert "got --prompt set/9, expected one of set/0, set/1, set/2" in capsys.readouterr().err


def test_entropies_by_offset(tool, file, capsys):
    assert tool.main([str(file), "--entropy"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("offset") and len(rows) == 51
    assert rows[0].split() == ["0", "1.0000", "(1)", "2.0000", "(6)"]
    assert rows[50].split() == ["50", "-", "(0)", "-", "(0)"]


def test_a_reader_that_stops_early_is_no_error(file):
    command = f"set -o pipefail; {sys.executable} {ROOT}/tools/show_tree.py {file} | head -1"
    write_trees(file, [nested_tree()] * 400, stage="rl", step=3)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "question set/0: Q\n"


def test_a_foreign_or_missing_file_is_an_error_message(tool, tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert tool.main([str(path)]) == 2
    assert f"error: {path}:1: got a line of 6 bytes that is no JSON" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
