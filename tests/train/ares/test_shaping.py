"""ARES through whole steps: numbers worked by hand, trajectories of several rows."""

from __future__ import annotations

from dataclasses import replace
from math import tanh

import pytest
import torch

from mega_agentrl.algo import ares
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import AresMode
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig
from mega_agentrl.errors import InputError
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.shaping import (
    add_entropy_rewards,
    ares_metrics,
    build_rules,
    mean_ref_kl,
    start_ares_step,
    token_kl_weights,
    update_controllers,
)
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.types.records import ContextReset, StopReason
from tests.train.entropy_trees import path, steady, tree

KNOWN = ares.AresState(
    difficulty_by_prompt={"old": ares.EASY},
    targets=(1.0, 2.0, 4.0),
    alphas=(0.5, 0.6, 1.0),
    lambdas=(0.01, 0.02, 0.04),
    betas=(0.02, 0.03, 0.05),
    threshold=2.0,
)
RULES = replace(ares.PAPER_HYPERPARAMS, kl_coef=0.01)
RELEASED = replace(ares.RELEASED_HYPERPARAMS, kl_coef=0.01)


def two_groups():
    """`old` is known as easy, and hard by now; `new` is hard, one of its five failed."""
    failed = path(None, steady(9), stop_reason=StopReason.aborted)
    return [
        tree("old", path(1, steady(5)), path(0, steady(5)), path(0, steady(0)), path(0, [1.0])),
        tree("new", path(1, steady(4)), failed, path(0, steady(3), steady(6)), *[path(0, [])] * 2),
    ]


def started(trees, state=KNOWN, rules=RULES, *, filtered=True):
    return start_ares_step(collect_entropy_stats(trees, None), state, rules, filtered=filtered)


def sigmoid(x):
    return (1 + tanh(x / 2)) / 2


def with_reference(batch, kl=0.0):
    logp_BT = torch.full(batch.mask_BT.shape, -1.0)
    return batch.with_fields(old_logp_BT=logp_BT, ref_logp_BT=logp_BT - kl)


def test_a_step_is_shaped_by_the_state_from_before_it():
    trees = two_groups()
    step = started(trees)
    assert step.ares_stats.hwe_B.tolist() == [5, 5, 0, 0, 4, 9, 0, 0]
    assert step.difficulty_B.tolist() == [0] * 4 + [2] * 4
    # Easy, margin 1: right with 3 too many: .5 * (3 - 1) / (1 + 2); wrong: .6 * .5 * tanh(3 / 4).
    # Hard, margin 1.4, cap 1.2: right at its target: tanh(1.4 / 6); wrong with 3.6 too many.
    earned = [-1 / 3, 0.3 * tanh(0.75), 0, 0, 1.2 * tanh(1.4 / 6), 1.2 * tanh(3.6 / 6), 0, 0]
    assert step.entropy_reward_B.tolist() == pytest.approx(earned)
    batch = pack_trees(trees)
    shaped = add_entropy_rewards(batch, trees, step)
    expected = [*earned[:4], earned[4], 0.0, *earned[5:]]
    assert (shaped.reward_B - batch.reward_B).tolist() == pytest.approx(expected, abs=1e-6)
    assert batch.reward_B.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0]


def test_kl_is_weighed_by_token_inside_and_outside_of_windows():
    trees = two_groups()
    step, batch = started(trees), pack_trees(trees)
    assert token_kl_weights(batch, trees, step) is None
    weight_BT = token_kl_weights(with_reference(batch), trees, step)
    # 9 tokens, the first of which lies in no window.
    assert weight_BT[0, :9].tolist() == pytest.approx([0.02] + [0.01] * 8)
    assert weight_BT[2, :4].tolist() == pytest.approx([0.02] * 4)
    # Turns of 7 and 10 tokens with a tool's between them.
    expected = [0.05] + [0.025] * 6 + [0.05, 0.05] + [0.025] * 9
    assert weight_BT[6, :18].tolist() == pytest.approx(expected)
    assert weight_BT[5].tolist() == pytest.approx([0.01] * batch.mask_BT.shape[1])
    assert weight_BT.dtype == torch.float32


def test_rows_of_one_trajectory_are_its_parts():
    resets = (ContextReset(start=7, token_ids=(9, 9)),)
    several = path(1, steady(2), steady(3), context_resets=resets)
    trees = [tree("old", path(0, steady(1)), several)]
    step, batch = started(trees), pack_trees(trees)
    assert batch.trajectory_B.tolist() == [0, 1, 1] and batch.length_B.tolist() == [5, 7, 7]
    shaped = add_entropy_rewards(batch, trees, step).reward_B - batch.reward_B
    assert shaped[1] == shaped[2] == pytest.approx(float(step.entropy_reward_B[1]))
    weight_BT = token_kl_weights(with_reference(batch), trees, step)
    assert weight_BT[1].tolist() == pytest.approx([0.02] + [0.01] * 5 + [0.02])
    assert weight_BT[2].tolist() == pytest.approx([0.02] + [0.01] * 6)
    batch = with_reference(batch)
    ref_BT = batch.ref_logp_BT.clone()
    ref_BT[1, 0], ref_BT[2, 0], ref_BT[1, 6] = -1.5, -1.7, 99.0
    kl_B = mean_ref_kl(batch.with_fields(ref_logp_BT=ref_BT), trees, step, "k1")
    assert kl_B.tolist() == pytest.approx([0.0, (0.5 + 0.7) / 13])


def test_the_mean_kl_is_known_for_trained_rows_only():
    trees = two_groups()
    step, batch = started(trees), with_reference(pack_trees(trees[1:]), kl=0.2)
    kl_B = mean_ref_kl(batch, trees[1:], step, "k1")
    assert kl_B[:4].isnan().all() and kl_B[4:6].tolist() == pytest.approx([0.2, 0.2])
    assert kl_B[6:].isnan().all(), "they have no sampled token"
    assert mean_ref_kl(pack_trees(trees[1:]), trees[1:], step, "k1") is None
    weight_BT = token_kl_weights(batch, trees[1:], step)
    assert weight_BT[0, 0] == pytest.approx(0.05)


def test_another_batch_s_trees_are_refused():
    trees = two_groups()
    with pytest.raises(InputError) as caught:
        add_entropy_rewards(pack_trees(trees), trees[:1], started(trees))
    got = "4 trajectories for a batch of 9 rows"
    assert (caught.value.name, caught.value.got) == ("trees", got)


def test_the_first_step_starts_threshold_and_targets_and_shapes_nothing():
    right, wrong = path(1, steady(6)), path(0, steady(2, entropy=2.0))
    step = started([tree("p", *[right] * 4, *[wrong] * 4)], ares.AresState())
    assert step.threshold == 2.5 and step.ares_stats.hwe_B.tolist() == [6] * 4 + [0] * 4
    assert step.entropy_reward_B.tolist() == [0.0] * 8 and step.difficulty_B.tolist() == [1] * 8
    after = update_controllers(Controllers(), step, None)
    assert after.ares.threshold == 2.5 and after.ares.targets == (None, 6.0, None)
    assert after.ares.difficulty_by_prompt == {"p": 1} and after.ares.alphas == (0.5,) * 3
    assert after.mastery.correct_streaks == {"p": 0} and after.mastery.last_entropies == {"p": 2.5}


def test_the_update_moves_targets_alphas_and_lambdas():
    trees = [tree("p", *[path(1, steady(6))] * 4, *[path(0, steady(8))] * 4)]
    state = replace(KNOWN, difficulty_by_prompt={"p": 1})
    step = started(trees, state)
    kl_B = mean_ref_kl(with_reference(pack_trees(trees), kl=0.05), trees, step, "k1")
    before = Controllers(ares=state)
    after = update_controllers(before, step, kl_B)
    assert before.ares is state
    assert after.ares.alphas == pytest.approx((0.5, 0.6 + 0.05 * (7 - 2) / 2, 1.0))
    assert after.ares.targets == pytest.approx((1.0, 0.9 * 2 + 0.1 * 6, 4.0))
    assert after.ares.lambdas == pytest.approx((0.01, 0.02 + 0.1 * 0.03, 0.04))
    assert after.ares.betas == pytest.approx((0.02, 0.033, 0.05))
    assert after.ares.threshold == pytest.approx(0.99 * 2 + 0.01 * 3)
    metrics = ares_metrics(after, step, kl_B)
    assert metrics["ares/medium/kl"] == pytest.approx(0.05) and metrics["ares/medium/hwe"] == 7
    assert metrics["ares/medium/share"] == 1 and metrics["ares/num_mastered"] == 0
    # Margin 1, kappa 3: 4 or 6 windows above the target of 2.
    right, wrong = -min(0.6, 0.6 * (3 * 3 / 6) / 4), 0.8 * 0.6 * tanh(5 / 5)
    assert metrics["ares/entropy_reward_mean"] == pytest.approx((right + wrong) / 2)
    assert metrics["ares/entropy_reward_abs_mean"] == pytest.approx((wrong - right) / 2)


def test_a_step_without_valid_trajectories_keeps_the_state():
    trees = [tree("p", path(None, steady(1), stop_reason=StopReason.aborted))]
    for rules in (RULES, RELEASED):
        step = started(trees, ares.AresState(), rules)
        assert update_controllers(Controllers(), step, None) == Controllers()
        assert "ares/entropy_reward_mean" in ares_metrics(Controllers(), step, None)


def released_trees():
    marks = [(1, 6), (0, 2), (0, 2), (0, 2)]
    return [tree("p", *(path(mark, steady(size)) for mark, size in marks))]


def test_released_shapes_by_the_batch_s_own_targets():
    state = ares.AresState(threshold=2.0)
    step = started(released_trees(), state, RELEASED, filtered=False)
    # The mean count is 3: target 3, alpha stays .5, hard. Margin 1.05, temperature 3, cap .6.
    earned = [0.6 * sigmoid((3 + 1.05) / 3)] + [0.3] * 3
    assert step.difficulty_B.tolist() == [2] * 4
    assert step.entropy_reward_B.tolist() == pytest.approx(earned)
    after = update_controllers(Controllers(ares=state), step, torch.full((4,), 0.05).double()).ares
    assert after.targets == (None, None, 3.0) and after.alphas == (0.5,) * 3
    assert after.released_kl.num_updates == 1
    assert after.released_kl.kl_means == (None, None, pytest.approx(0.05))


def test_released_mode_uses_the_state_of_the_step_before():
    state = replace(KNOWN, betas=(0.01, 0.02, 0.03))
    step = started(released_trees(), state, RELEASED)
    # Easy, target 0, margin 1, alpha .5: right with 6, wrong with 2.
    assert step.entropy_reward_B.tolist() == pytest.approx([-0.5] + [0.3 * sigmoid(0.5)] * 3)
    trees = released_trees()
    weight_BT = token_kl_weights(with_reference(pack_trees(trees)), trees, step)
    assert weight_BT.unique().tolist() == pytest.approx([0.03])


def test_released_counts_every_trigger_until_it_has_a_threshold():
    trees = [tree("p", path(1, steady(3, entropy=0.0)))]
    step = started(trees, ares.AresState(), RELEASED, filtered=False)
    assert step.threshold == -1.0 and step.ares_stats.hwe_B.tolist() == [3]
    assert update_controllers(Controllers(), step, None).ares.threshold == 0.0


def test_rules_follow_the_mode_and_the_weight_of_now():
    paper = build_rules(AlgoConfig(ares=AresConfig(mode=AresMode.paper)), 0.03)
    assert (paper.name, paper.kl_coef) == ("paper", 0.03)
    assert paper == replace(ares.PAPER_HYPERPARAMS, kl_coef=0.03)
    released = build_rules(AlgoConfig(ares=AresConfig(mode=AresMode.released)), 0.01)
    assert released == ares.RELEASED_HYPERPARAMS


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("window_tokens", 7, "window"),
        ("kl_window_factor", 0.25, "kl_window_factor"),
        ("margin_fraction", [0.1, 0.2, 0.3], "margin_fraction"),
        ("alpha_rate", 0.2, "alpha_rate"),
        ("alpha_max", 3.0, "alpha_max"),
        ("threshold_decay", 0.5, "threshold_decay"),
        ("target_rate", 0.3, "target_rate"),
        ("kl_budget", [0.1, 0.2, 0.3], "kl_budget"),
        ("kl_budget_rate", 0.4, "lambda_rate"),
        ("min_trajectories", 2, "min_trajectories"),
    ],
)
def test_every_setting_reaches_the_rules(setting, value, name):
    settings = AresConfig(mode=AresMode.paper, **{setting: value})
    expected = tuple(value) if isinstance(value, list) else value
    rules = build_rules(AlgoConfig(ares=settings), ares.PAPER_HYPERPARAMS.kl_coef)
    assert rules == replace(ares.PAPER_HYPERPARAMS, **{name: expected})


def test_rewards_and_weights_follow_the_rules():
    # `new` is hard with target 4 and has 2, 0, 5 windows; a margin of half is 2, of nothing is 1.
    trees = two_groups()
    wide = started(trees, rules=replace(RULES, margin_fraction=(0.0, 0.0, 1.0)))
    assert not torch.equal(wide.entropy_reward_B, started(trees).entropy_reward_B)
    batch = with_reference(pack_trees(trees), kl=0.1)
    weights = [
        token_kl_weights(
            batch, trees, started(trees, rules=replace(RULES, kl_window_factor=factor))
        )
        for factor in (1.0, 0.25)
    ]
    ratio_BT = weights[1] / weights[0]
    assert sorted(ratio_BT.unique().tolist()) == pytest.approx([0.25, 1.0])
