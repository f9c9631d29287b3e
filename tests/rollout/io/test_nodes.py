"""Nodes hold the tree exactly, and every token leads to its decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.rollout.io.nodes import (
    find_fork_decision,
    find_token_origin,
    to_node_tree,
    to_rollout_tree,
)
from mega_agentrl.types.records import (
    Role,
    RolloutTree,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt
from tests.rollout.grown_trees import grown, nested_tree


@settings(max_examples=30, deadline=None)
@given(grown())
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
        for position in range(len(one.token_ids)):
            origin = find_token_origin(nodes, one.path, position)
            assert nodes.nodes[origin.node].token_ids[origin.offset] == one.token_ids[position]
            writer = by_path[origin.path]
            assert writer.path == one.path[: len(writer.path)]
            assert position >= writer.fork_len
            assert (origin.decision is None) == (writer.parent_id is None)
            if origin.decision is not None:
                assert origin.decision.path == writer.path[:-1]
                assert origin.decision.position == writer.fork_len
                assert origin.decision.num_forks > 0


@settings(max_examples=30, deadline=None)
@given(grown(rounds=False))
def test_decisions_account_for_every_fork_and_every_probe(tree):
    for one in tree.trajectories:
        children = [other for other in tree.trajectories if other.parent_id == one.trajectory_id]
        assert sum(decision.num_forks for decision in one.decisions) == len(children)
        for decision in one.decisions:
            assert 0 <= decision.num_forks <= decision.num_slots_left
            assert decision.baseline_entropy == one.baseline_entropy
            probed = one.entropies[
                decision.position : decision.position + len(decision.probe_entropies)
            ]
            assert tuple(probed) == decision.probe_entropies
            assert (
                one.loss_mask[decision.position] == 1 and one.loss_mask[decision.position - 1] == 0
            )


@settings(max_examples=30, deadline=None)
@given(st.tuples(grown(), grown()))
def test_nodes_are_those_of_the_training_batch(trees):
    if not any(any(t.loss_mask) and not t.failed for tree in trees for t in tree.trajectories):
        return
    batch = pack_trees(trees)
    ours = {}
    rows = [(i, to_node_tree(tree), t) for i, tree in enumerate(trees) for t in tree.trajectories]
    for row, (index, nodes, one) in enumerate(rows):
        for position in range(len(one.token_ids)):
            origin = find_token_origin(nodes, one.path, position)
            theirs = int(batch.node_BT[row, position])
            assert ours.setdefault((index, origin.node, origin.offset), theirs) == theirs
    assert len(set(ours.values())) == len(ours), "different tokens have different ids"


def test_a_nested_tree_by_hand():
    tree = nested_tree()
    nodes = to_node_tree(tree)
    assert [one.path for one in tree.trajectories] == [(0,), (0, 0), (0, 0, 0), (0, 1)]
    written = Counter(node.path for node in nodes.nodes)
    # 0 asks twice and speaks three times; 0.0 and 0.1, 0.0.0 go on behind the first and second
    # answer.
    assert written == {(0,): 5, (0, 0): 3, (0, 0, 0): 1, (0, 1): 1}
    first, second = tree.trajectories[0].decisions
    assert (first.position, first.num_slots_left, first.num_forks) == (
        len("thinkhard<search>q1</search>") + 22,
        3,
        1,
    )
    assert (
        first.probe_entropies == (2.0,) * 8
        and first.baseline_entropy == 1.0
        and first.delta_h == 1.0
    )
    assert find_fork_decision(nodes, (0,)) is None
    assert find_fork_decision(nodes, (0, 0)) == first
    assert find_fork_decision(nodes, (0, 1)) == second
    (nested,) = tree.trajectories[1].decisions
    assert find_fork_decision(nodes, (0, 0, 0)) == nested
    assert find_token_origin(nodes, (0, 0, 0), 0).path == (0,)
    assert find_token_origin(nodes, (0, 0, 0), first.position).decision == first
    assert find_token_origin(nodes, (0, 0, 0), nested.position).decision == nested


def test_a_decision_that_did_not_fork_is_recorded():
    calm = nested_tree(after=0.5)
    asked = [[decision.num_forks for decision in one.decisions] for one in calm.trajectories]
    assert asked == [[0, 0], [], [], []]
    assert calm.num_top_ups == 3 and calm.trajectories[0].decisions[1].delta_h == -0.5


def test_an_unknown_path_or_position_is_an_error():
    nodes = to_node_tree(nested_tree())
    with pytest.raises(ValueError, match=r"got path 7, has 0, 0\.0, 0\.0\.0, 0\.1"):
        find_token_origin(nodes, (7,), 0)
    with pytest.raises(ValueError, match="position 500"):
        find_token_origin(nodes, (0,), 500)


def test_what_is_no_tree_is_an_error():
    tree = nested_tree()
    root, fork = tree.trajectories[:2]
    with pytest.raises(ValueError, match="expected one that comes earlier"):
        to_node_tree(replace(tree, trajectories=[fork, root]))
    with pytest.raises(ValueError, match="are not those of"):
        to_node_tree(replace(tree, trajectories=[root, replace(fork, fork_len=fork.fork_len + 1)]))
    other = replace(fork, token_ids=[fork.token_ids[0] + 1, *fork.token_ids[1:]])
    with pytest.raises(ValueError, match="are not those of"):
        to_node_tree(replace(tree, trajectories=[root, other]))
    with pytest.raises(ValueError, match="expected turns that tile all"):
        to_node_tree(replace(tree, trajectories=[replace(root, turns=root.turns[:-1])]))


def test_argmax_ids_are_in_the_nodes_or_nowhere():
    tree = nested_tree()
    nodes = to_node_tree(tree)
    assert [list(one.argmax_ids) for one in to_rollout_tree(nodes).trajectories] == [
        [token if mask else -1 for token, mask in zip(one.token_ids, one.loss_mask, strict=True)]
        for one in tree.trajectories
    ]
    with pytest.raises(ValueError, match="'argmax_ids': 1"):
        replace(nodes.nodes[0], argmax_ids=(1,))


def test_authors_take_turns_in_the_nodes():
    nodes = to_node_tree(nested_tree())
    for node in nodes.nodes:
        before = None if node.parent is None else nodes.nodes[node.parent].turn.role
        expected = Role.assistant if before in (None, Role.tool) else Role.tool
        assert node.turn.role is expected


def test_answers_that_came_in_together_are_nodes_without_tokens_but_the_last():
    outcome = ToolOutcome(tool="python", status=ToolStatus.ok, answer="1", latency_s=0.1)
    spans = [(Role.assistant, 2), (Role.tool, 0), (Role.tool, 3), (Role.assistant, 2)]
    root = _by_hand((0,), spans, outcome)
    fork = _by_hand((0, 0), spans, outcome, parent_id="(0,)", fork_len=5)
    fork.token_ids[5:] = [8, 9]
    tree = RolloutTree(prompt=root.prompt, trajectories=[root, fork], num_forks=1)
    nodes = to_node_tree(tree)
    assert [(node.parent, len(node.token_ids)) for node in nodes.nodes] == [
        (None, 2),
        (0, 0),
        (1, 3),
        (2, 2),
        (2, 2),
    ]
    assert to_rollout_tree(nodes) == tree
    # Without decisions nobody can say which one made the fork.
    assert find_token_origin(nodes, (0, 0), 6).decision is None
    assert find_token_origin(nodes, (0, 0), 6).path == (0, 0)
    assert find_token_origin(nodes, (0, 0), 4).path == (0,)


def test_a_turn_without_tokens_at_the_fork_stays_with_the_fork():
    # Its tools could not be forked: a turn without tokens, right where it begins.
    outcome = ToolOutcome(tool="python", status=ToolStatus.infra_error, answer="", latency_s=0)
    spans = [(Role.assistant, 2), (Role.tool, 3)]
    root = _by_hand((0,), [*spans, (Role.assistant, 2)], outcome)
    fork = _by_hand((0, 0), [*spans, (Role.tool, 0)], outcome, parent_id="(0,)", fork_len=5)
    tree = RolloutTree(prompt=root.prompt, trajectories=[root, fork], num_forks=1)
    assert to_rollout_tree(to_node_tree(tree)) == tree
    assert [node.path for node in to_node_tree(tree).nodes] == [(0,), (0,), (0,), (0, 0)]


def _by_hand(path, spans, outcome, **changes):
    """A trajectory whose turns have the given authors and lengths; token 1, mask by author."""
    turns, mask, ids = [], [], []
    for index, (author, size) in enumerate(spans):
        said = author is Role.assistant
        start = len(mask)
        mask += [int(said)] * size
        ids += [index] * size
        answer = None if said else outcome
        turns.append(
            Turn(index=index, role=author, start=start, stop=len(mask), text="t", outcome=answer)
        )
    size = len(mask)
    return Trajectory(
        trajectory_id=str(path),
        prompt=make_prompt(),
        path=path,
        token_ids=[1] * size,
        loss_mask=mask,
        logps=[0.0] * size,
        entropies=[0.0] * size,
        versions=[1] * size,
        turn_ids=ids,
        turns=turns,
        stop_reason=StopReason.eos,
        **changes,
    )
