"""Nodes hold the tree exactly, and every token leads to its decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.io.nodes import to_node_tree, to_rollout_tree
from mega_agentrl.types.records import Role, RolloutTree
from tests.fakes import make_trajectory
from tests.rollout.grown_trees import find_fork_decision, grown, nested_tree, part, parted

SPANS = [(Role.assistant, 2), (Role.tool, 3), (Role.assistant, 4)]


def _tree(*trajectories):
    return RolloutTree(
        prompt=trajectories[0].prompt,
        trajectories=list(trajectories),
        num_forks=sum(one.parent_id is not None for one in trajectories),
    )


def _origins(nodes, path):
    """Of each response token of a path: index of its node, and offset in the node."""
    (leaf,) = [one for one in nodes.leaves if one.record_fields["path"] == path]
    return [
        (index, offset)
        for index in nodes.node_indices(leaf)
        for offset in range(len(nodes.nodes[index].token_ids))
    ]


@settings(max_examples=60, deadline=None)
@given(st.one_of(grown(), parted()))
def test_leaves_become_the_trajectories_again(tree):
    nodes = to_node_tree(tree)
    assert to_rollout_tree(nodes) == tree
    assert len(nodes.leaves) == len(tree.trajectories)
    # Physically one token, once: roots and what forks wrote themselves.
    assert sum(len(node.token_ids) for node in nodes.nodes) == sum(
        len(one.token_ids) - one.fork_len for one in tree.trajectories
    )
    assert all(node.parent is None or node.parent < i for i, node in enumerate(nodes.nodes))


@settings(max_examples=30, deadline=None)
@given(grown())
def test_every_token_leads_to_the_decision_that_made_it(tree):
    nodes = to_node_tree(tree)
    by_path = {one.path: one for one in tree.trajectories}
    for one in tree.trajectories:
        origins = _origins(nodes, one.path)
        assert len(origins) == len(one.token_ids)
        for position, (index, offset) in enumerate(origins):
            assert nodes.nodes[index].token_ids[offset] == one.token_ids[position]
            writer = by_path[nodes.nodes[index].path]
            assert writer.path == one.path[: len(writer.path)]
            assert position >= writer.fork_len
            decision = find_fork_decision(tree, writer.path)
            assert (decision is None) == (writer.parent_id is None)
            if decision is not None:
                assert decision.path == writer.path[:-1]
                assert decision.position == writer.fork_len
                assert decision.num_forks > 0


@settings(max_examples=30, deadline=None)
@given(grown(rounds=False))
def test_decisions_account_for_every_fork_and_every_probe(tree):
    for one in tree.trajectories:
        children = [other for other in tree.trajectories if other.parent_id == one.trajectory_id]
        assert sum(decision.num_forks for decision in one.decisions) == len(children)
        for decision in one.decisions:
            assert 0 <= decision.num_forks <= decision.num_slots_left
            assert decision.baseline_entropy == one.baseline_entropy
            position, num_probed = decision.position, len(decision.probe_entropies)
            probed = one.entropies[position : position + num_probed]
            assert tuple(probed) == decision.probe_entropies
            assert one.loss_mask[position] == 1 and one.loss_mask[position - 1] == 0


@settings(max_examples=30, deadline=None)
@given(st.tuples(grown(), st.one_of(grown(), parted())))
def test_tokens_of_nodes_are_those_of_the_training_batch(trees):
    if not any(any(t.loss_mask) and not t.failed for tree in trees for t in tree.trajectories):
        return
    batch = pack_trees(trees)
    ours = {}
    rows = [(i, to_node_tree(tree), t) for i, tree in enumerate(trees) for t in tree.trajectories]
    for row, (index, nodes, one) in enumerate(rows):
        for position, origin in enumerate(_origins(nodes, one.path)):
            theirs = int(batch.tree_token_BT[row, position])
            assert ours.setdefault((index, *origin), theirs) == theirs
    assert len(set(ours.values())) == len(ours), "different tokens have different ids"


def test_a_nested_tree_has_a_node_for_each_turn():
    tree = nested_tree()
    nodes = to_node_tree(tree)
    assert [one.path for one in tree.trajectories] == [(0,), (0, 0), (0, 0, 0), (0, 1)]
    written = Counter(node.path for node in nodes.nodes)
    # 0 asks twice and speaks three times; 0.0 and 0.1, 0.0.0 go on behind the first and second
    # answer.
    assert written == {(0,): 5, (0, 0): 3, (0, 0, 0): 1, (0, 1): 1}
    first, second = tree.trajectories[0].decisions
    assert (first.position, first.num_slots_left, first.num_forks) == (28 + 22, 3, 1)
    assert first.probe_entropies == (2.0,) * 8
    assert first.baseline_entropy == 1.0 and first.delta_h == 1.0
    (nested,) = tree.trajectories[1].decisions
    writers = [nodes.nodes[index].path for index, _ in _origins(nodes, (0, 0, 0))]
    positions = (0, first.position, nested.position)
    assert [writers[at] for at in positions] == [(0,), (0, 0), (0, 0, 0)]
    made_by = [find_fork_decision(tree, one.path) for one in tree.trajectories]
    assert made_by == [None, first, nested, second]


def test_paths_that_part_inside_of_a_turn_split_its_node():
    root = make_trajectory((0,), SPANS)
    tree = part(_tree(root), root, root.turns[2], 7, num_new=3)
    (fork,) = tree.trajectories[1:]
    tree = part(tree, fork, fork.turns[2], 9, num_new=1)
    tree = part(tree, root, root.turns[2], 9, num_new=2)
    assert [(one.path, one.fork_len, len(one.token_ids)) for one in tree.trajectories] == [
        ((0,), 0, 9),
        ((0, 0), 7, 10),
        ((0, 0, 0), 9, 10),
        ((0, 1), 9, 11),
    ]
    nodes = to_node_tree(tree)
    # Node 4 has no tokens: the root's turn ends where path 0.1 goes on with it.
    assert [(n.parent, n.path, n.start, n.stop, n.turn and n.turn.text) for n in nodes.nodes] == [
        (None, (0,), 0, 2, "t"),
        (0, (0,), 2, 5, "t"),
        (1, (0,), 5, 7, None),
        (2, (0,), 7, 9, None),
        (3, (0,), 9, 9, "t"),
        (2, (0, 0), 7, 9, None),
        (5, (0, 0), 9, 10, "part (0, 0)"),
        (5, (0, 0, 0), 9, 10, "part (0, 0, 0)"),
        (3, (0, 1), 9, 11, "part (0, 1)"),
    ]
    assert [leaf.last_node for leaf in nodes.leaves] == [4, 6, 7, 8]
    assert to_rollout_tree(nodes) == tree


def test_a_path_may_leave_a_turn_and_write_the_same():
    root = make_trajectory((0,), [(Role.assistant, 4)])
    fork = make_trajectory((0, 0), [(Role.assistant, 4)], parent_id="0", fork_len=3)
    nodes = to_node_tree(_tree(root, fork))
    spans = [(node.parent, node.start, node.stop) for node in nodes.nodes]
    assert spans == [(None, 0, 3), (0, 3, 4), (0, 3, 4)]
    assert to_rollout_tree(nodes) == _tree(root, fork)


def test_a_leaf_inside_of_a_turn_is_an_error():
    root = make_trajectory((0,), [(Role.assistant, 4)])
    nodes = to_node_tree(part(_tree(root), root, root.turns[0], 3, num_new=1))
    leaves = [replace(leaf, last_node=0) for leaf in nodes.leaves]
    with pytest.raises(InputError) as caught:
        to_rollout_tree(replace(nodes, leaves=leaves))
    assert caught.value.name.endswith("path 0: the last node")
    assert caught.value.got == 0


FIRST_TOKENS = "first tokens and turns of "


def _fork_inside_of_a_tool_answer(root, fork):
    root = make_trajectory((0,), SPANS)
    return part(_tree(root), root, root.turns[1], 4, num_new=0).trajectories


@pytest.mark.parametrize(
    ("change", "name", "fact"),
    [
        pytest.param(
            lambda root, fork: [fork, root], "parent of ", "", id="fork before its parent"
        ),
        pytest.param(
            lambda root, fork: [root, replace(fork, fork_len=fork.fork_len + 1)],
            FIRST_TOKENS,
            "fork_len=51",
            id="fork inside of a turn",
        ),
        pytest.param(
            lambda root, fork: [root, replace(fork, token_ids=[9, *fork.token_ids[1:]])],
            FIRST_TOKENS,
            "fork_len=50",
            id="other tokens",
        ),
        pytest.param(
            _fork_inside_of_a_tool_answer,
            FIRST_TOKENS,
            "fork_len=4",
            id="fork inside of an answer",
        ),
        pytest.param(
            lambda root, fork: [replace(root, turns=root.turns[:-1])],
            "turns of trajectory ",
            "ends at ",
            id="missing turn",
        ),
    ],
)
def test_trajectories_that_are_no_tree_are_refused(change, name, fact):
    trajectories = change(*nested_tree().trajectories[:2])
    with pytest.raises(InputError) as caught:
        to_node_tree(_tree(*trajectories))
    assert caught.value.name.startswith(name)
    assert fact in str(caught.value.got)


def test_argmax_ids_are_in_the_nodes_or_nowhere():
    tree = nested_tree()
    nodes = to_node_tree(tree)
    assert [list(one.argmax_ids) for one in to_rollout_tree(nodes).trajectories] == [
        [token if mask else -1 for token, mask in zip(one.token_ids, one.loss_mask, strict=True)]
        for one in tree.trajectories
    ]
    with pytest.raises(InputError) as caught:
        replace(nodes.nodes[0], argmax_ids=(1,))
    assert caught.value.got["argmax_ids"] == 1


def test_answers_that_came_in_together_are_nodes_without_tokens_but_the_last():
    spans = [(Role.assistant, 2), (Role.tool, 0), (Role.tool, 3), (Role.assistant, 2)]
    root = make_trajectory((0,), spans)
    fork = make_trajectory((0, 0), spans, parent_id="0", fork_len=5)
    fork.token_ids[5:] = [8, 9]
    nodes = to_node_tree(_tree(root, fork))
    sizes = [(node.parent, len(node.token_ids)) for node in nodes.nodes]
    assert sizes == [(None, 2), (0, 0), (1, 3), (2, 2), (2, 2)]
    assert to_rollout_tree(nodes) == _tree(root, fork)
    writers = [nodes.nodes[index].path for index, _ in _origins(nodes, (0, 0))]
    assert writers == [(0,)] * 5 + [(0, 0)] * 2


def test_a_turn_without_tokens_at_the_fork_stays_with_the_fork():
    # Its tools could not be forked: a turn without tokens, right where it begins.
    spans = [(Role.assistant, 2), (Role.tool, 3)]
    root = make_trajectory((0,), [*spans, (Role.assistant, 2)])
    fork = make_trajectory((0, 0), [*spans, (Role.tool, 0)], parent_id="0", fork_len=5)
    tree = _tree(root, fork)
    assert to_rollout_tree(to_node_tree(tree)) == tree
    assert [node.path for node in to_node_tree(tree).nodes] == [(0,), (0,), (0,), (0, 0)]
