"""Finished trees are restored after a crash and dropped with a checkpoint."""

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.rollout.groups.batch_collector import RolloutCollector
from mega_agentrl.rollout.io.tree_store import TreeStore
from mega_agentrl.types.records import StopReason
from tests.fakes import FakeGenerator, FakeRubric, make_context, make_prompt

PROMPTS = [make_prompt(f"p{index}", f"Q{index}") for index in range(6)]


def collect(path, generator=None, step="train-1", **changes):
    """One step of three groups; the trees, the counts and the engine that was asked."""
    generator = generator or FakeGenerator()
    store = TreeStore(path)
    config = RolloutConfig(group_size=4, max_response_tokens=60, max_turns=4, **changes)
    context = make_context(config, generator=generator, max_model_len=128, tree_store=store)
    groups = RolloutCollector(PromptSampler(PROMPTS, 1), context, FakeRubric(), num_groups=3)
    collected = asyncio.run(groups.collect(step))
    return collected.trees, collected.group_counts["num_groups_restored"], generator


def test_finished_trees_are_not_sampled_again(tmp_path):
    path = tmp_path / "kept.bin"
    first, num_restored, _ = collect(path)
    assert num_restored == 0
    again, num_restored, engine = collect(path)
    assert num_restored == 3
    assert not engine.requests
    assert again == first
    assert all(one.prompt is tree.prompt for tree in again for one in tree.trajectories)
    assert all(any(tree.prompt is prompt for prompt in PROMPTS) for tree in again)


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.released])
def test_a_record_that_was_cut_short_is_sampled_again_and_alike(tmp_path, branching):
    path = tmp_path / "kept.bin"
    first, _, _ = collect(path, branching=branching)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    again, num_restored, engine = collect(path, branching=branching)
    # What goes in lock-step is had together or not at all.
    assert num_restored == (0 if branching is Branching.released else 2)
    assert engine.requests
    assert again == first


def test_stored_trees_fit_only_their_weights_step_and_prompt(tmp_path):
    path = tmp_path / "kept.bin"
    trees, _, _ = collect(path)
    assert collect(path, FakeGenerator(version=2), step="train-1")[1] == 0
    assert collect(path, step="train-2")[1] == 0
    store = TreeStore(path)
    tree = trees[0]
    name = tree.prompt.prompt_id
    assert store.get("train-2", name, tree.prompt, oldest=1, newest=1) is not None
    other = replace(tree.prompt, token_ids=(*tree.prompt.token_ids, 1))
    assert store.get("train-2", name, other, oldest=1, newest=1) is None


def test_a_stored_tree_is_found_if_all_tokens_are_recent_enough(tmp_path):
    (tree, *_), _, _ = collect(tmp_path / "kept.bin")
    store, name = TreeStore(tmp_path / "other.bin"), tree.prompt.prompt_id
    one = tree.trajectories[0]
    at = one.loss_mask.index(1)
    one.versions = tuple(3 if place == at else 2 for place, _ in enumerate(one.versions))
    for other in tree.trajectories[1:]:
        other.versions = (2,) * len(other.versions)
    store.put("train-1", name, 9, tree)
    for read in (store, TreeStore(tmp_path / "other.bin")):
        found = {
            (oldest, newest): read.get("train-1", name, tree.prompt, oldest=oldest, newest=newest)
            for oldest in (1, 2, 3)
            for newest in (2, 3, 4)
        }
        matches = {bounds for bounds, one in found.items() if one is not None}
        assert matches == {(1, 3), (1, 4), (2, 3), (2, 4)}
    store.drop_newer_than(3)
    assert len(store) == 1
    store.drop_newer_than(2)
    assert len(store) == 0


def test_a_checkpoint_drops_its_steps_and_keeps_later_ones(tmp_path):
    path = tmp_path / "kept.bin"
    collect(path, step="train-1")
    later, _, _ = collect(path, step="train-2")
    store = TreeStore(path)
    assert len(store) == 6
    store.drop_steps(frozenset({"train-1"}))
    for read in (store, TreeStore(path)):
        assert read.steps == {"train-2"}
        for tree in later:
            prompt = tree.prompt
            found = read.get("train-2", prompt.prompt_id, prompt, oldest=1, newest=1)
            assert len(found.trajectories) == 4
    store.drop_steps()
    assert not path.exists()
    assert len(store) == 0


def test_failed_trees_are_not_stored(tmp_path):
    tree = collect(tmp_path / "kept.bin")[0][0]
    store = TreeStore(tmp_path / "other.bin")
    tree.trajectories[0].stop_reason = StopReason.aborted
    store.put("train-1", "failed", 1, tree)
    assert len(store) == 0
