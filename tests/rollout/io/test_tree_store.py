"""Finished trees are restored after a crash and dropped with a checkpoint."""

import asyncio
import os
import pickle
import random
from array import array
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.rollout.groups.batch_collector import RolloutCollector
from mega_agentrl.rollout.io.tree_store import TreeStore
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.journal import Journal
from mega_agentrl.types.records import ContextReset, RolloutTree, StopReason
from tests.fakes import FakeGenerator, FakeRubric, make_context, make_prompt, make_scored_tree
from tests.rollout.grown_trees import grown, nested_tree, parted

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


def put_and_get(path, tree):
    """The tree as a restarted run has it; None if it was dropped."""
    TreeStore(path).put("train-1", "key", 1, tree)
    return TreeStore(path).get("train-1", "key", tree.prompt, oldest=-9, newest=9)


def record_of(path, tree):
    """The only record of a store, as plain values."""
    TreeStore(path).put("train-1", "key", 1, tree)
    ((_, body),) = Journal(path).recover(bytes)
    path.unlink()
    return msgspec.msgpack.decode(body)


@settings(max_examples=30, deadline=None)
@given(tree=st.one_of(grown(), parted()))
def test_trees_of_any_shape_are_restored_equal(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("store") / "kept.bin"
    alive = [one for one in tree.trajectories if not one.failed]
    tree = replace(tree, trajectories=[replace(one, parent_id=None, fork_len=0) for one in alive])
    assert put_and_get(path, tree) == tree


@pytest.mark.parametrize(
    "text", ["plain", "half of \ud83d", "\x00"], ids=["text", "surrogate", "NUL"]
)
def test_rare_values_are_restored_exactly(tmp_path, text):
    tree = nested_tree()
    root = tree.trajectories[0]
    outcome = replace(root.turns[1].outcome, answer=text, metrics={"a": 0.1})
    changed = replace(
        root,
        turns=[root.turns[0], replace(root.turns[1], text=text, outcome=outcome), *root.turns[2:]],
        logps=[float("-inf"), 1e300, 1 / 3, *root.logps[3:]],
        context_resets=(ContextReset(start=50, token_ids=(1, 2)),),
        request_counts={"ignored/n": 3},
        argmax_ids=array("i", [-1] * len(root.token_ids)),
    )
    prompt = make_prompt("p0", text, extra_info={"a": (1, 2.5), "big": 10**30})
    changed.prompt = prompt
    greedy = replace(root, prompt=make_prompt("a copy"))
    tree = RolloutTree(prompt=prompt, trajectories=[changed], greedy_trajectory=greedy)
    restored = put_and_get(tmp_path / "kept.bin", tree)
    assert restored.greedy_trajectory.prompt is prompt
    assert restored == replace(tree, greedy_trajectory=replace(greedy, prompt=prompt))
    assert isinstance(restored.trajectories[0].argmax_ids, array)


def test_images_are_restored_with_their_bytes_and_stored_once(tmp_path):
    def image(name, data):
        sizes = {"width": 56, "height": 28, "grid_thw": (1, 2, 4), "merge_size": 2}
        return ImageInput(image_id=name, data=data, **sizes)

    files = [bytes([number]) * 5_000 for number in range(2)]
    records = [image("a", files[0]), image("b", files[1])]
    tree = nested_tree()
    roots = [one for one in tree.trajectories if one.parent_id is None]
    first = roots[0].turns[1]
    shown = replace(first, outcome=replace(first.outcome, images=(files[0], records[1])))
    placed = tuple(
        PlacedImage(start=at, image=one) for at, one in zip((1, 7), records, strict=True)
    )
    reset = ContextReset(start=3, token_ids=(1,) * 9, images=(placed[1],))
    trajectories = [
        replace(
            roots[0],
            path=(number,),
            turns=[roots[0].turns[0], shown, *roots[0].turns[2:]],
            images=placed,
            context_resets=(reset,),
        )
        for number in range(8)
    ]
    tree = RolloutTree(prompt=tree.prompt, trajectories=trajectories)
    path = tmp_path / "kept.bin"
    restored = put_and_get(path, tree)
    assert restored == tree
    one = restored.trajectories[5]
    assert [part.image.data for part in one.images] == files
    assert one.context_resets[0].images[0].image.data == files[1]
    assert one.turns[1].outcome.images[0] == files[0]
    assert one.turns[1].outcome.images[1].data == files[1]
    assert [path.read_bytes().count(data) for data in files] == [1, 1]


def test_text_that_forks_share_is_stored_once(tmp_path):
    tree = nested_tree()
    text = "shared " * 2_000
    root = next(one for one in tree.trajectories if one.parent_id is None)
    turn = replace(root.turns[0], text=text)
    trajectories = [
        replace(root, path=(number,), turns=[turn, *root.turns[1:]]) for number in range(16)
    ]
    shared = RolloutTree(prompt=tree.prompt, trajectories=trajectories)
    path = tmp_path / "kept.bin"
    assert put_and_get(path, shared) == shared
    assert path.read_bytes().count(text.encode()) == 1


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_foreign_file_runs_no_code_and_costs_one_line(tmp_path, caplog):
    path, mark = tmp_path / "kept.bin", tmp_path / "ran"
    tree = make_scored_tree(None, spans=())
    for body in (pickle.dumps(Command(mark)), pickle.dumps(("s", "k", (1, 1), Command(mark)))):
        Journal(path).append(body)
    assert len(TreeStore(path)) == 0
    assert not mark.exists()
    assert len(caplog.records) == 1
    assert not path.exists()
    assert put_and_get(path, replace(tree, trajectories=[])) is not None


def test_a_record_of_an_earlier_version_has_the_defaults_of_its_missing_fields(tmp_path):
    """The package is upgraded in the middle of a step: the class has a field that it had not."""
    path, tree = tmp_path / "kept.bin", nested_tree()
    record = record_of(path, tree)
    for one in record["trajectories"]:
        del one["template_drift"], one["context_resets"]
    record["fields"] = [name for name in record["fields"] if "template_drift" not in name]
    del record["num_abandoned_forks"], record["turns"][0]["outcome"]
    Journal(path).append(msgspec.msgpack.encode(record))
    restored = TreeStore(path).get("train-1", "key", tree.prompt, oldest=0, newest=9)
    assert restored == tree


def test_a_record_with_an_unknown_field_is_dropped_and_the_others_stay(tmp_path, caplog):
    path, tree = tmp_path / "kept.bin", nested_tree()
    record = record_of(path, tree)
    for key in ("old", "new"):
        fields = record["fields"] + ["Trajectory.tomorrow"] * (key == "new")
        Journal(path).append(msgspec.msgpack.encode(record | {"key": key, "fields": fields}))
    store = TreeStore(path)
    assert len(store) == 1
    assert len(caplog.records) == 1
    assert "Trajectory.tomorrow" in caplog.text
    assert store.get("train-1", "old", tree.prompt, oldest=0, newest=9) == tree
    assert store.get("train-1", "new", tree.prompt, oldest=0, newest=9) is None
    caplog.clear()
    assert len(TreeStore(path)) == 1, "the record is gone from the file"
    assert not caplog.records


def change_of(*places, value):
    """A function that sets the value at a place of a record."""

    def change(record):
        *outer, last = places
        for place in outer:
            record = record[place]
        record[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_of("trajectories", 0, "token_ids", value=[1]),
        change_of("trajectories", 0, "token_ids", 0, value="1"),
        change_of("trajectories", 0, "turns", 0, value=-1),
        change_of("trajectories", 0, "turns", 0, value=10**6),
        change_of("trajectories", 0, "turn_ids", 0, value=77),
        change_of("trajectories", 0, "fork_len", value=10**9),
        change_of("trajectories", 0, "images", value=[[0, 0]]),
        change_of("trajectories", 0, "routes", value=[0]),
        change_of("trajectories", 0, "argmax_ids", 0, value=2**40),
        change_of("trajectories", 0, "stop_reason", value="bored"),
        change_of("trajectories", value=[{}]),
        change_of("trajectories", value=None),
        change_of("turns", 0, "stop", value=10**9),
        change_of("files", value=["x"]),
        change_of(
            "routes",
            value=[
                {
                    "response_start": 0,
                    "context_length": 0,
                    "routes": {
                        "expert_NLK": {"dtype": "|O", "shape": [1, 1, 1], "data": bytes(8)},
                        "digest_N": {"dtype": "<u4", "shape": [-1], "data": bytes(4)},
                    },
                }
            ],
        ),
    ],
)
def test_a_record_that_does_not_fit_is_sampled_again_with_a_line(tmp_path, change, caplog):
    path, tree = tmp_path / "kept.bin", nested_tree()
    record = record_of(path, tree)
    change(record)
    Journal(path).append(msgspec.msgpack.encode(record))
    store = TreeStore(path)
    assert len(store) == 1
    assert store.get("train-1", "key", tree.prompt, oldest=0, newest=9) is None
    assert len(caplog.records) == 1


def test_no_change_of_a_few_bytes_ends_the_run(tmp_path):
    path, tree = tmp_path / "kept.bin", nested_tree()
    body = msgspec.msgpack.encode(record_of(path, tree))
    rng = random.Random(0)
    for _ in range(150):
        changed = bytearray(body)
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(len(body))] = rng.randrange(256)
        Journal(path).append(bytes(changed[: rng.choice([len(body), rng.randrange(1, len(body))])]))
        store = TreeStore(path)
        store.get("train-1", "key", tree.prompt, oldest=0, newest=9)
        path.unlink(missing_ok=True)


def test_a_tree_that_no_record_can_hold_is_left_out_with_a_line(tmp_path, caplog):
    (tree, *_), _, _ = collect(tmp_path / "kept.bin")
    tree.trajectories[0].tool_rewards = {"a": object()}
    store = TreeStore(tmp_path / "other.bin")
    store.put("train-1", "key", 1, tree)
    assert len(store) == 0
    assert len(caplog.records) == 1
