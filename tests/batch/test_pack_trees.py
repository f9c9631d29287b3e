"""`batch.packing`: trees by hand, and properties of collected ones."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.batch.packing import (
    PAD_TREE_TOKEN,
    fill_rewards,
    pack_trees,
)
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.records import ContextReset, RolloutTree, Score, StopReason, Trajectory
from tests.fakes import FakeRubric, make_context, make_prompt

PROMPT = make_prompt()


def _row(name, token_ids, mask, reward=0.0, *, parent=None, fork_len=0, **changes):
    size = len(token_ids)
    values = {
        "trajectory_id": name,
        "prompt": PROMPT,
        "path": (0,),
        "token_ids": token_ids,
        "loss_mask": mask,
        "logps": [-0.5] * size,
        "entropies": [0.25] * size,
        "versions": [4] * size,
        "turn_ids": [0] * size,
        "turns": [],
        "stop_reason": StopReason.eos,
        "parent_id": parent,
        "fork_len": fork_len,
        "score": Score(value=reward, correct=False, f1=0.0, answer="", reason=""),
    }
    return Trajectory(**(values | changes))


def _aborted_row(name):
    return _row(name, [5], [1], score=None, stop_reason=StopReason.aborted)


def _tree(*rows):
    return RolloutTree(prompt=PROMPT, trajectories=list(rows))


def test_two_trees_become_the_rows_of_a_batch():
    first = _tree(
        _row("a", [1, 2, 3, 4], [1, 0, 1, 1], 1.0),
        _row("b", [1, 2, 9], [1, 0, 1], 0.5, parent="a", fork_len=2),
        _row("c", [1, 2, 9, 7, 7], [1, 0, 1, 1, 1], parent="b", fork_len=3),
    )
    second = _tree(_row("d", [1, 2], [1, 1], -1.0), _aborted_row("e"))
    batch = pack_trees([first, second])
    assert batch.response_BT.tolist() == [
        [1, 2, 3, 4, 0],
        [1, 2, 9, 0, 0],
        [1, 2, 9, 7, 7],
        [1, 2, 0, 0, 0],
        [5, 0, 0, 0, 0],
    ]
    assert batch.tree_token_BT.tolist() == [
        [0, 1, 2, 3, -1],
        [0, 1, 4, -1, -1],
        [0, 1, 4, 5, 6],
        [7, 8, -1, -1, -1],
        [9, -1, -1, -1, -1],
    ]
    assert batch.mask_BT.int().tolist() == [
        [1, 0, 1, 1, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert batch.length_B.tolist() == [4, 3, 5, 2, 1]
    assert batch.group_B.tolist() == [0, 0, 0, 1, 2], "the failed row is in no prompt's group"
    assert batch.reward_B.tolist() == [1.0, 0.5, 0.0, -1.0, 0.0]
    assert batch.rollout_logp_BT[0].tolist() == [-0.5] * 4 + [0.0]
    assert batch.version_BT[4].tolist() == [4, 0, 0, 0, 0]
    assert batch.prompt_ids == (PROMPT.token_ids,) * 5
    assert batch.mask_BT.dtype == torch.bool and batch.reward_B.dtype == torch.float32


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_equal_tree_tokens_are_exactly_the_shared_prefixes(seed, num_trajectories):
    config = RolloutConfig(group_size=num_trajectories, max_response_tokens=100)
    prompts = [make_prompt("p0"), make_prompt("p1")]
    trees = asyncio.run(collect_rollouts(prompts, FakeRubric(), make_context(config, seed=seed)))
    rows = [row for tree in trees for row in tree.trajectories]
    batch = pack_trees(trees)
    real = batch.tree_token_BT != PAD_TREE_TOKEN
    assert real.sum(1).tolist() == batch.length_B.tolist()
    assert batch.mask_BT.sum().item() == sum(sum(row.loss_mask) for row in rows)
    own = sum(len(row.token_ids) - row.fork_len for row in rows)
    assert batch.tree_token_BT[real].unique().numel() == own
    for token in batch.tree_token_BT[real].unique():
        holders, position = (batch.tree_token_BT == token).nonzero(as_tuple=True)
        assert position.unique().numel() == 1
        until = int(position[0]) + 1
        assert batch.response_BT[holders, :until].unique(dim=0).shape[0] == 1
        assert batch.group_B[holders].unique().numel() == 1


def test_every_part_after_a_context_reset_is_a_row():
    resets = (ContextReset(start=3, token_ids=(40, 41)), ContextReset(start=5, token_ids=(42,)))
    turned = _row("a", [1, 2, 3, 4, 5], [1, 1, 0, 1, 1], 1.0, context_resets=resets)
    fork = _row(
        "b", [1, 2, 3, 9], [1, 1, 0, 1], 0.5, parent="a", fork_len=3, context_resets=resets[:1]
    )
    batch = pack_trees([_tree(turned, fork), _tree(_row("d", [1], [1], -1.0))])
    prompt = PROMPT.token_ids
    assert batch.prompt_ids == (prompt, (40, 41), prompt, (40, 41), prompt)
    assert batch.trajectory_B.tolist() == [0, 0, 1, 1, 2]
    assert batch.response_BT.tolist() == [[1, 2, 3], [4, 5, 0], [1, 2, 3], [9, 0, 0], [1, 0, 0]]
    assert batch.mask_BT.int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert batch.tree_token_BT.tolist() == [
        [0, 1, 2],
        [3, 4, -1],
        [0, 1, 2],
        [5, -1, -1],
        [6, -1, -1],
    ]
    assert batch.length_B.tolist() == [3, 2, 3, 1, 1]
    assert batch.reward_B.tolist() == [1, 1, 0.5, 0.5, -1]
    assert batch.group_B.tolist() == [0, 0, 0, 0, 1]
    assert pack_trees([_tree(_row("d", [1], [1], -1.0))]).trajectory_B is None


def image(name, *, loaded=True):
    return ImageInput(
        image_id=name,
        width=28,
        height=28,
        grid_thw=(1, 2, 2),
        merge_size=2,
        pixels_HWC=np.zeros((28, 28, 3), dtype=np.uint8) if loaded else None,
    )


def test_images_of_prompt_response_and_new_context_are_placed_in_the_rows():
    picture, zoomed = PlacedImage(start=1, image=image("a")), PlacedImage(start=2, image=image("b"))
    reset = ContextReset(start=3, token_ids=(40, 41), images=(picture,))
    prompt = replace(PROMPT, token_ids=(7, 8, 9, 7), images=(picture,))
    turned = _row(
        "a", [1, 2, 3, 4, 5, 6], [1, 1, 0, 1, 1, 1], prompt=prompt, context_resets=(reset,),
        images=(zoomed, PlacedImage(start=4, image=image("a", loaded=False))),
    )  # fmt: skip
    plain = _row("b", [1, 2], [1, 1], prompt=prompt)
    batch = pack_trees([RolloutTree(prompt=prompt, trajectories=[turned, plain])])
    placed = [[(part.image.image_id, part.start) for part in row] for row in batch.images_B]
    # The second part of `a` begins with response token 3, after a context of two tokens.
    assert placed == [[("a", 1), ("b", 4 + 2)], [("a", 1), ("a", 2 + 4 - 3)], [("a", 1)]]
    objects = {id(part.image) for row in batch.images_B for part in row}
    assert len(objects) == 2, "one object for each image, with its pixels"
    assert pack_trees([_tree(_row("d", [1], [1], -1.0))]).images_B is None


@pytest.mark.parametrize(("name", "num_shared"), [("a", 3), ("b", 1)], ids=["same", "other"])
def test_a_new_context_shares_tokens_up_to_another_image(name, num_shared):
    # Prompt 7 8 9 6 and new context 7 8 9 5, in which token 8 is the placeholder of an image.
    prompt = replace(
        PROMPT, token_ids=(7, 8, 9, 6), images=(PlacedImage(start=1, image=image("a")),)
    )
    reset = ContextReset(
        start=1, token_ids=(7, 8, 9, 5), images=(PlacedImage(start=1, image=image(name)),)
    )
    turned = _row("a", [1, 2], [1, 1], 1.0, prompt=prompt, context_resets=(reset,))
    batch = pack_trees([RolloutTree(prompt=prompt, trajectories=[turned])])
    assert batch.shared_length_B.tolist() == [0, num_shared]


def test_an_image_that_was_not_loaded_is_named():
    unloaded = PlacedImage(start=0, image=image("a", loaded=False))
    tree = _tree(_row("a", [1, 2], [0, 1], images=(unloaded,)))
    with pytest.raises(InputError) as caught:
        pack_trees([tree])
    assert (caught.value.name, caught.value.got) == ("pixels of image a (from a tool)", None)


def test_a_batch_without_a_token_to_train_on_says_how_the_trajectories_ended():
    with pytest.raises(InputError) as caught:
        pack_trees([_tree(_aborted_row("a"))])
    assert caught.value.got == {"aborted": 1}
    with pytest.raises(InputError) as caught:
        pack_trees([])
    assert caught.value.got == {}


@pytest.mark.parametrize(
    ("rows", "name", "got"),
    [
        ([_row("b", [1], [1], parent="a")], "parent of trajectory b", "a"),
        (
            [_row("a", [1, 2], [1, 1]), _row("b", [1, 3], [1, 1], parent="a", fork_len=2)],
            "first 2 tokens of trajectory b",
            [1, 3],
        ),
    ],
    ids=["unknown-parent", "other-prefix"],
)
def test_a_fork_that_does_not_belong_to_its_parent_is_refused(rows, name, got):
    with pytest.raises(InputError) as caught:
        pack_trees([_tree(*rows)])
    assert (caught.value.name, caught.value.got) == (name, got)


def test_rewards_of_a_trajectory_without_a_score_are_refused():
    unscored = [_tree(_row("a", [1], [1], score=None))]
    with pytest.raises(InputError) as caught:
        fill_rewards(pack_trees(unscored), unscored)
    assert (caught.value.name, caught.value.got) == ("score of trajectory a", None)


def test_rewards_filled_in_later_equal_those_of_a_batch_packed_later():
    # "c" is two rows; "b" turns out to have no reward.
    resets = (ContextReset(start=2, token_ids=(9,)),)
    rows = [
        _row("a", [1, 2], [1, 1], 1.0),
        _row("b", [3], [1], 0.5),
        _row("c", [1, 2, 3], [1, 0, 1], 0.25, context_resets=resets),
    ]
    trees = [_tree(*rows)]
    scores = [row.score for row in rows]
    for row in rows:
        row.score = None
    early = pack_trees(trees)
    assert early.reward_B.isnan().all() and early.mask_BT[1].any()
    rows[0].score, rows[1].reward_error, rows[2].score = scores[0], "it hung", scores[2]
    late, whole = fill_rewards(early, trees), pack_trees(trees)
    assert late.reward_B.tolist() == [1.0, 0.0, 0.25, 0.25]
    assert late.group_B.tolist() == [0, 1, 0, 0] and not late.mask_BT[1].any()
    for name in ("reward_B", "group_B", "mask_BT", "trajectory_B", "response_BT"):
        assert torch.equal(getattr(late, name), getattr(whole, name)), name
    for row in rows:
        row.score, row.reward_error = None, "judge down"
    with pytest.raises(InputError) as caught:
        fill_rewards(early, trees)
    assert caught.value.got == {"judge down": 3}


def test_baselines_are_the_rewards_of_greedy_answers():
    reset = ContextReset(start=2, token_ids=(8, 9))
    parts = _row("a", [1, 2, 3], [1, 1, 1], 1.0, context_resets=(reset,))
    trees = [_tree(parts, _row("b", [4], [1])), *(_tree(_row(name, [5], [1])) for name in "cd")]
    batch = pack_trees(trees)
    assert fill_rewards(batch, trees).baseline_B is None
    trees[0].greedy_trajectory = _row("g", [7], [1], 0.25)
    trees[1].greedy_trajectory = _aborted_row("h")
    found = fill_rewards(batch, trees).baseline_B.tolist()
    assert found[:3] == [0.25] * 3
    assert all(math.isnan(value) for value in found[3:])
