"""The trees on the page and the list that leads to them."""

from __future__ import annotations

import json
import re

from mega_agentrl.report.tree_blocks import (
    LEAST_ENTROPY,
    TreeShelf,
    blocks_markup,
    colour_end,
    tree_block,
)
from mega_agentrl.report.tree_view import tree_view
from tests.rollout.grown_trees import nested_tree


def path(reward, *, correct=False, failed=False):
    return {"reward": reward, "correct": correct, "failed": failed}


def view(*paths, asks="why?"):
    question = [{"role": "user", "text": asks}]
    return {"id": "a/1", "source": "a", "question": question, "forks": 1, "paths": list(paths)}


def blocks_of(markup):
    found = re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', markup)
    return {name: json.loads(text) for name, text in found}


def test_marks_and_mean_reward():
    block = tree_block(
        7,
        view(
            path(1.0, correct=True),
            path(0.5),
            path(-1.0),
            path(None),
            path(9.0, failed=True),
            path(float("nan")),
        ),
    )
    assert block.entry == {
        "index": 7,
        "id": "a/1",
        "source": "a",
        "asks": "why?",
        "marks": "gpbvvb",
        "forks": 1,
        "reward": 2.375,
    }
    assert block.num_bytes == len(block.data)


def test_a_tree_without_paths_and_question():
    entry = tree_block(0, view() | {"question": []}).entry
    assert (entry["marks"], entry["reward"], entry["asks"]) == ("", 0.0, "")


def test_blocks_are_numbered_through_and_the_last_step_comes_first():
    block = tree_block(0, tree_view(nested_tree()))
    shelves = [
        TreeShelf(key="held_out_before", label="before", num_trees=9, blocks=[block]),
        TreeShelf(key="step_000010", label="RL step 10", num_trees=2, blocks=[block, block]),
        TreeShelf(key="step_000020", label="RL step 20", num_trees=2, blocks=[block]),
        TreeShelf(key="step_000030", label="RL step 30", num_trees=2, blocks=[]),
        TreeShelf(key="held_out_after", label="after", num_trees=9, blocks=[block]),
    ]
    found = blocks_of(blocks_markup(shelves, 2.5))
    index = found["tree-index"]
    assert (index["most"], index["start"]) == (2.5, "step_000020")
    assert [file["key"] for file in index["files"]] == [
        "held_out_before",
        "step_000010",
        "step_000020",
        "held_out_after",
    ]
    numbers = [tree["block"] for file in index["files"] for tree in file["trees"]]
    assert numbers == [0, 1, 2, 3, 4]
    assert all(found[f"tree-{number}"]["id"] == "set/0" for number in numbers)


def test_no_tree_at_all():
    assert blocks_of(blocks_markup([], 1.0)) == {
        "tree-index": {"most": 1.0, "start": "", "files": []}
    }


def test_where_colours_end():
    assert colour_end([0.1 * value for value in range(101)]) == 0.1 * 99
    assert colour_end([0.0, 0.0]) == LEAST_ENTROPY
    assert colour_end([]) == 1.0
