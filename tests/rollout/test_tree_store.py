"""Trees come back whole after a crash, at the weights that made them, and go with a checkpoint."""

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.config.choices import Branching
from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.rollout.collector import make_context
from mega_agentrl.rollout.groups import GroupCollector
from mega_agentrl.rollout.tree_store import TreeStore
from mega_agentrl.types.records import StopReason
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt

PROMPTS = [make_prompt(f"p{index}", f"Q{index}") for index in range(6)]


def collect(path, generator=None, step="train-1", **changes):
    """One step of three groups; the trees, the counts and the engine that was asked."""
    generator = generator or FakeGenerator()
    store = TreeStore(path)
    config = RolloutConfig(num_trajectories=4, max_response_tokens=60, max_turns=4, **changes)
    context = make_context(
        generator=generator,
        tools=FakeTools(),
        codec=CharCodec(),
        config=config,
        max_model_len=128,
        seed=1,
        step="train",
        store=store,
    )
    groups = GroupCollector(PromptSampler(PROMPTS, 1), context, FakeRubric(), num_groups=3)
    collected = asyncio.run(groups.collect(step))
    return collected.trees, collected.counts["groups_reused"], generator


def test_what_had_finished_is_not_sampled_again(tmp_path):
    path = tmp_path / "kept.bin"
    first, reused, _ = collect(path)
    assert reused == 0
    again, reused, engine = collect(path)
    assert reused == 3
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
    again, reused, engine = collect(path, branching=branching)
    # What goes in lock-step is had together or not at all.
    assert reused == (0 if branching is Branching.released else 2)
    assert engine.requests
    assert again == first


def test_other_weights_another_step_and_another_prompt_find_nothing(tmp_path):
    path = tmp_path / "kept.bin"
    trees, _, _ = collect(path)
    assert collect(path, FakeGenerator(version=2), step="train-1")[1] == 0
    assert collect(path, step="train-2")[1] == 0
    store = TreeStore(path)
    tree = trees[0]
    name = tree.prompt.prompt_id
    assert store.find("train-2", name, 1, tree.prompt) is not None
    other = replace(tree.prompt, token_ids=(*tree.prompt.token_ids, 1))
    assert store.find("train-2", name, 1, other) is None


def test_a_checkpoint_forgets_its_steps_and_keeps_later_ones(tmp_path):
    path = tmp_path / "kept.bin"
    collect(path, step="train-1")
    later, _, _ = collect(path, step="train-2")
    store = TreeStore(path)
    assert len(store) == 6
    store.forget(frozenset({"train-1"}))
    for read in (store, TreeStore(path)):
        assert read.steps == {"train-2"}
        found = [read.find("train-2", tree.prompt.prompt_id, 1, tree.prompt) for tree in later]
        assert [len(tree.trajectories) for tree in found] == [4, 4, 4]
    store.forget()
    assert not path.exists()
    assert len(store) == 0


def test_failed_and_mixed_trees_are_not_kept(tmp_path):
    tree = collect(tmp_path / "kept.bin")[0][0]
    store = TreeStore(tmp_path / "other.bin")
    store.put("train-1", "mixed", 2, tree)
    tree.trajectories[0].stop_reason = StopReason.aborted
    store.put("train-1", "failed", 1, tree)
    assert len(store) == 0
