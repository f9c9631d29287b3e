"""Tree files are read as they were written; errors name place and cause."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.rollout.io import tree_file
from mega_agentrl.rollout.io.nodes import to_node_tree, to_rollout_tree
from mega_agentrl.rollout.io.tree_file import read_trees, write_trees
from mega_agentrl.types.records import ContextReset, Role, StopReason, ToolStatus
from mega_agentrl.types.serialization import to_builtins
from tests.rollout.grown_trees import grown, nested_tree, parted


def _restored(path):
    return [to_rollout_tree(stored.tree) for stored in read_trees(path)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(grown(), parted()), min_size=1, max_size=3))
def test_written_trees_are_read_back_equal(tmp_path_factory, trees):
    path = tmp_path_factory.mktemp("trees") / "step.jsonl"
    write_trees(path, trees, stage="rl", step=7)
    stored = list(read_trees(path))
    assert [one.tree for one in stored] == [to_node_tree(tree) for tree in trees]
    assert [to_rollout_tree(one.tree) for one in stored] == trees
    assert {(one.stage, one.step) for one in stored} == {("rl", 7)}


def test_rare_field_values_are_read_back(tmp_path):
    tree = nested_tree()
    root = tree.trajectories[3]
    outcome = replace(
        root.turns[1].outcome,
        status=ToolStatus.timeout,
        queue_s=0.25,
        answer="half of \ud83d, \u2028 and \x00",
        step_reward=-1.0,
        metrics={"a": 1.5},
        is_invalid_call=True,
    )
    last = replace(root.turns[-1], role=Role.user, outcome=outcome)
    changed = replace(
        root,
        turns=[*root.turns[:-1], last],
        stop_reason=StopReason.trajectory_timeout,
        versions=[*root.versions[:-3], 7, 8, 9],
        loss_mask=[*root.loss_mask[:-1], 0],
        logps=[*root.logps[:-2], float("-inf"), 1e300],
        score=replace(root.score, parts={"rule": 0.5}, reason="why"),
        tool_rewards={"gsm8k": 1.0},
        context_resets=(
            ContextReset(start=50, token_ids=(1, 2)),
            ContextReset(start=101, token_ids=()),
        ),
        template_drift="<think>",
    )
    trees = [replace(tree, trajectories=[*tree.trajectories[:3], changed], num_extra_roots=2)]
    path = tmp_path / "step.jsonl"
    write_trees(path, trees, stage="rl", step=1)
    assert _restored(path) == trees


def test_trees_without_argmax_ids_come_back_without(tmp_path):
    tree = nested_tree()
    assert any(one.argmax_ids for one in tree.trajectories)
    bare = [replace(one, argmax_ids=one.argmax_ids[:0]) for one in tree.trajectories]
    trees = [replace(tree, trajectories=bare)]
    path = tmp_path / "step.jsonl"
    write_trees(path, trees, stage="rl", step=1)
    assert _restored(path) == trees


def test_values_without_a_json_form_become_text(tmp_path):
    tree = nested_tree()
    prompt = replace(tree.prompt, extra_info={"complex": 1j, "pair": (1, 2)})
    for one in tree.trajectories:
        one.prompt = prompt
    path = tmp_path / "step.jsonl"
    write_trees(path, [replace(tree, prompt=prompt)], stage="rl", step=1)
    (restored,) = _restored(path)
    assert restored.prompt.extra_info == {"complex": "1j", "pair": [1, 2]}


singles = st.floats(width=32, allow_nan=False)
doubles = st.floats(allow_nan=False)


def _bits(values):
    return np.asarray(values, dtype=np.float64).tobytes()


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.lists(singles), st.lists(doubles), st.lists(st.sampled_from([0.0, -0.0]))))
def test_floats_come_back_bit_for_bit(values):
    packed = json.loads(json.dumps(to_builtins(tree_file._pack_floats(values))))
    restored = msgspec.convert(packed, tree_file.PackedFloats)
    assert _bits(tree_file._unpack(restored, len(values))) == _bits(values)


def test_float32_values_are_written_with_few_digits():
    third, seventh = float(np.float32(1 / 3)), float(np.float32(1 / 7))
    assert third != 1 / 3
    packed = to_builtins(tree_file._pack_floats([third, seventh]))
    assert json.dumps(packed) == '{"f4": [0.33333334, 0.14285715]}'
    assert tree_file._pack_floats([1 / 3, 1 / 7]) == [1 / 3, 1 / 7]
    assert tree_file._pack_floats([0.1, 0.1]) == 0.1


def _written(tmp_path):
    path = tmp_path / "folder" / "step.jsonl"
    write_trees(path, [nested_tree()] * 2, stage="rl", step=3)
    return path


def test_a_failed_write_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = _written(tmp_path)
    before = path.read_bytes()
    tree = nested_tree()
    broken = replace(tree, trajectories=tree.trajectories[1:])
    with pytest.raises(InputError) as caught:
        write_trees(path, [tree, broken], stage="rl", step=3)
    assert caught.value.name.startswith("parent of trajectory ")
    assert path.read_bytes() == before
    assert list(path.parent.glob("*.jsonl")) == [path]
    write_trees(path, [tree], stage="rl", step=3)
    assert list(path.parent.iterdir()) == [path]


def _change(line, **changes):
    return json.dumps(json.loads(line) | changes)


def _change_node(line, **changes):
    first, second, *others = json.loads(line)["nodes"]
    return _change(line, nodes=[first, second | changes, *others])


@pytest.mark.parametrize(
    ("damage", "place", "fact"),
    [
        (lambda a, b: a + b[: len(b) // 2], ":2", "half a line"),
        (lambda a, b: a, "", "1 lines"),
        (lambda a, b: "", "", "0 lines"),
        (lambda a, b: b, ":1", "tree 1 of 2"),
        (lambda a, b: a + b + b, ":3", "tree 1 of 2"),
        (lambda a, b: "hello\n", ":1", "6 bytes"),
        (lambda a, b: '{"step": 1}\n', ":1", "format"),
        (lambda a, b: "[1]\n", ":1", "format"),
        (lambda a, b: _change(a, format=1), ":1", "format 1"),
        (lambda a, b: '{"format": 3}', ":1", "`stage`"),
        (lambda a, b: _change(a, more=1), ":1", "['more']"),
        (lambda a, b: _change(a, nodes=[{}]), ":1", "`parent` - at `$.nodes[0]`"),
        (lambda a, b: _change(a, nodes=[]), ":1", "prompt set/0, path 0"),
        (lambda a, b: _change(a, num_forks="x"), ":1", "`$.num_forks`"),
        (lambda a, b: _change(a, leaves=[{}]), ":1.leaves[0]", "missing required"),
        (lambda a, b: _change_node(a, token_ids=["a"]), ":1", "`$.nodes[1].token_ids[0]`"),
        (lambda a, b: _change_node(a, token_ids=[1.5]), ":1", "`$.nodes[1].token_ids[0]`"),
        (lambda a, b: _change_node(a, logps=[0.5]), ":1.nodes[1]", "turn 1: "),
    ],
)
def test_errors_of_a_damaged_or_foreign_file_name_the_line(tmp_path, damage, place, fact):
    path = _written(tmp_path)
    path.write_text(damage(*path.read_text().splitlines(keepends=True)))
    with pytest.raises(ValueError) as caught:
        list(read_trees(path))
    where, _, rest = str(caught.value).partition(": ")
    assert where == f"{path}{place}"
    assert fact in rest


def test_trees_are_read_one_by_one(tmp_path):
    path = _written(tmp_path)
    first, _ = path.read_text().splitlines(keepends=True)
    path.write_text(first)
    reader = read_trees(path)
    assert next(reader).tree.prompt.prompt_id == "set/0"
    with pytest.raises(InputError) as caught:
        next(reader)
    assert (caught.value.name, caught.value.got) == (str(path), "1 lines")


@pytest.mark.parametrize("stop", [-1, 10**12], ids=["negative", "huge"])
def test_a_line_cannot_name_more_tokens_than_a_tree_has(tmp_path, stop):
    """Equal tokens are stored as one number, so that a short line may ask for any memory."""
    path = tmp_path / "step.jsonl"
    write_trees(path, [nested_tree()], stage="rl", step=1)
    line = json.loads(path.read_text())
    line["nodes"][0] |= {"start": 0, "stop": stop, "turn": None, "token_ids": 5}
    path.write_text(json.dumps(line))
    with pytest.raises(InputError) as caught:
        list(read_trees(path))
    assert caught.value.name == f"{path}:1: tokens of the nodes"


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "step.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(InputError) as caught:
        list(read_trees(path))
    assert caught.value.name == f"{path}:1"
