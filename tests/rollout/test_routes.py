"""Routes stay with their tokens, from any rollout to the rows of the batch."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.io.nodes import to_node_tree, to_rollout_tree
from mega_agentrl.rollout.io.tree_store import TreeStore
from tests.fakes import FakeGenerator
from tests.rollout.grown_trees import configs, grow
from tests.rollout.routed_engine import RoutedEngine, check_routes


def grow_routed(config, seed=1, **options):
    return grow(config, seed=seed, generator=RoutedEngine(FakeGenerator()), **options)


@given(config=configs, seed=st.integers(0, 10_000))
def test_trees_of_any_branching_have_the_routes_of_their_tokens(config, seed):
    trees = grow_routed(config, seed, with_routes=True)
    assume(any(not one.failed for one in trees[0].trajectories))
    assert check_routes(trees) > 0


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.released])
def test_routes_are_returned_only_if_they_are_asked_for(branching):
    trees = grow_routed(RolloutConfig(group_size=2, branching=branching))
    assert all(not one.routes for tree in trees for one in tree.trajectories)


def test_each_token_of_a_path_is_returned_once():
    config = RolloutConfig(group_size=1, branching=Branching.none)
    engine = RoutedEngine(FakeGenerator())
    (tree,) = grow(config, generator=engine, with_routes=True)
    (one,) = tree.trajectories
    assert len(one.turns) > 2
    assert engine.num_routes == len(one.prompt.token_ids) + len(one.token_ids) - 1


def test_a_stored_tree_keeps_its_routes_and_a_file_leaves_them_out(tmp_path):
    trees = grow_routed(RolloutConfig(group_size=4), with_routes=True)
    store = TreeStore(tmp_path / "kept.bin")
    for index, tree in enumerate(trees):
        store.put("train-1", str(index), 1, tree)
    restored = [
        store.get("train-1", str(index), tree.prompt, oldest=0, newest=9)
        for index, tree in enumerate(trees)
    ]
    assert check_routes(restored) == check_routes(trees)
    shown = to_rollout_tree(to_node_tree(trees[0]))
    assert all(not one.routes for one in shown.trajectories)
    assert all(isinstance(one.argmax_ids, array) for one in shown.trajectories)
