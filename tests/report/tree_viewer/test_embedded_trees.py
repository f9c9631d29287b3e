"""The trees on the page, the list that leads to them, and which are chosen."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.tree_viewer.embedded_trees import (
    MIN_COLOUR_ENTROPY,
    MIN_TREES_PER_FILE,
    TreeFileSize,
    TreeFileView,
    embed_tree,
    evenly_spaced_indices,
    max_colour_entropy,
    render_embedded_trees,
    select_trees,
)
from mega_agentrl.report.tree_viewer.tree_json import tree_to_json
from tests.rollout.grown_trees import nested_tree


def path(reward, *, correct=False, failed=False):
    return {"reward": reward, "correct": correct, "failed": failed}


def view(*paths, asks="why?"):
    question = [{"role": "user", "text": asks}]
    return {"id": "a/1", "source": "a", "question": question, "forks": 1, "paths": list(paths)}


def blocks_of(markup):
    found = re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', markup)
    return {name: json.loads(text) for name, text in found}


def test_a_tree_has_a_mark_for_each_path_and_the_mean_of_its_rewards():
    paths = [path(1.0, correct=True), *map(path, (0.5, -1.0, None)), path(9.0, failed=True)]
    block = embed_tree(7, view(*paths, path(float("nan"))))
    assert block.index_entry == {
        "index": 7,
        "id": "a/1",
        "source": "a",
        "asks": "why?",
        "marks": "gpbvvb",
        "forks": 1,
        "reward": 2.375,
    }
    assert block.num_bytes == len(block.json_text)


def test_a_tree_without_paths_and_question():
    entry = embed_tree(0, view() | {"question": []}).index_entry
    assert (entry["marks"], entry["reward"], entry["asks"]) == ("", 0.0, "")


def test_blocks_are_numbered_through_and_the_last_step_comes_first():
    block = embed_tree(0, tree_to_json(nested_tree()))
    files = [
        TreeFileView(key="held_out_before", label="before", num_trees=9, trees=[block]),
        TreeFileView(key="step_000010", label="RL step 10", num_trees=2, trees=[block, block]),
        TreeFileView(key="step_000020", label="RL step 20", num_trees=2, trees=[block]),
        TreeFileView(key="step_000030", label="RL step 30", num_trees=2, trees=[]),
        TreeFileView(key="held_out_after", label="after", num_trees=9, trees=[block]),
    ]
    found = blocks_of(render_embedded_trees(files, 2.5))
    index = found["tree-index"]
    assert (index["most"], index["start"]) == (2.5, "step_000020")
    assert [file["key"] for file in index["files"]] == [
        one.key for one in files if one.key != "step_000030"
    ]
    numbers = [tree["block"] for file in index["files"] for tree in file["trees"]]
    assert numbers == [0, 1, 2, 3, 4]
    assert all(found[f"tree-{number}"]["id"] == "set/0" for number in numbers)


def test_without_a_tree_there_is_an_empty_index():
    assert blocks_of(render_embedded_trees([], 1.0)) == {
        "tree-index": {"most": 1.0, "start": "", "files": []}
    }


def test_colours_end_at_a_high_percentile_of_the_entropies():
    assert max_colour_entropy([0.1 * value for value in range(101)]) == 0.1 * 99
    assert max_colour_entropy([0.0, 0.0]) == MIN_COLOUR_ENTROPY
    assert max_colour_entropy([]) == 1.0


def size(num_bytes, num_trees):
    return TreeFileSize(num_bytes=num_bytes, num_trees=num_trees)


def test_all_trees_are_selected_if_they_fit():
    assert select_trees([size(100, 2), size(50, 3)], 150) == [[0, 1], [0, 1, 2]]
    assert select_trees([], 10) == []


def test_the_large_file_gets_what_the_small_one_leaves():
    # The small one needs 100 of its 500; the large one gets 900: 9 of its 19 trees of 100 bytes.
    chosen = select_trees([size(1900, 19), size(100, 4)], 1000)
    assert [len(one) for one in chosen] == [9, 4]
    assert chosen[0] == [0, 2, 4, 7, 9, 11, 14, 16, 18]


def test_files_are_left_out_evenly():
    # 4 trees of 10 bytes are wanted of each file: 120 bytes are enough for 3 of 9.
    chosen = select_trees([size(1000, 100)] * 9, 120)
    assert [index for index, one in enumerate(chosen) if one] == [0, 4, 8]
    assert [len(one) for one in chosen if one] == [MIN_TREES_PER_FILE] * 3


def test_files_without_trees_have_none_selected():
    assert select_trees([size(0, 0), size(10, 1)], 100) == [[], [0]]


def test_selected_indices_are_evenly_spaced():
    assert evenly_spaced_indices(5, 9) == [0, 1, 2, 3, 4]
    assert evenly_spaced_indices(5, 3) == [0, 2, 4]
    assert evenly_spaced_indices(5, 1) == [0]
    assert evenly_spaced_indices(5, 0) == []


sizes = st.builds(size, st.integers(0, 10_000), st.integers(0, 50))


@given(st.lists(sizes, max_size=12), st.integers(0, 20_000))
def test_indices_are_in_their_files_and_first_and_last_are_there(files, budget):
    chosen = select_trees(files, budget)
    for one, file in zip(chosen, files, strict=True):
        assert one == sorted(set(one))
        assert all(0 <= index < file.num_trees for index in one)
    filled = [index for index, file in enumerate(files) if file.num_trees]
    if filled:
        assert chosen[filled[0]] and chosen[filled[-1]]
