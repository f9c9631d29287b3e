"""`algo.ares.controllers`: golden traces and numbers by hand, of the paper and the release."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega_agentrl.algo import ares
from mega_agentrl.algo.ares.controllers import update_released_kl
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("ares_controllers")
NAN = float("nan")


def stats(correct, hwe, kl=None, p95=None, prompt="p"):
    """One group: its members' correctness, HWE counts, mean KL."""
    num = len(correct)
    return ares.AresStats(
        prompt_ids=(prompt,) * num,
        correct_B=torch.tensor(correct, dtype=torch.bool),
        hwe_B=torch.tensor(hwe),
        p95_B=torch.tensor([NAN] * num if p95 is None else p95, dtype=torch.float64),
        kl_B=None if kl is None else torch.full((num,), kl, dtype=torch.float64),
    )


def test_the_threshold_is_that_of_the_released_code():
    state = ares.AresState()
    for row in GOLDEN["hwe_threshold_ema"]:
        state = ares.update_threshold(state, torch.tensor(row["per_sample_p95"]))
        assert state.threshold == pytest.approx(row["ema"], abs=1e-6)


def test_threshold_ignores_trajectories_without_tokens_and_the_same_batch_twice():
    batch = torch.tensor([NAN, 1.0, 2.0, 4.0, 9.0])
    once = ares.update_threshold(ares.AresState(), batch)
    assert once.threshold == 3.0
    assert ares.update_threshold(once, batch).threshold == pytest.approx(3.0)
    assert ares.update_threshold(once, torch.tensor([NAN])) == once
    assert ares.update_threshold(once, torch.zeros(0)) == once


def test_first_batch_starts_targets_and_moves_no_alpha():
    # Medium: 4 of 8 right; the right ones hesitate 2, 4, 4, 2 times, the others 8 times.
    seen = stats([1, 1, 1, 1, 0, 0, 0, 0], [2, 4, 4, 2, 8, 8, 8, 8], kl=0.05, p95=[2.0] * 8)
    state = ares.update(ares.AresState(), seen)
    assert state.difficulty_by_prompt == {"p": 1}
    assert state.targets == (None, 3.0, None)
    assert state.alphas == (0.5, 0.5, 0.5)
    assert state.lambdas == pytest.approx((0.0, 0.1 * (0.05 - 0.02), 0.0))
    assert state.betas == pytest.approx((0.01, 0.013, 0.01))
    assert state.threshold == 2.0


@pytest.mark.parametrize(("correct", "code", "sign"), [(8, 0, 1), (4, 1, 1), (1, 2, -1)])
def test_the_second_batch_moves_alpha_and_a_tenth_of_the_target(correct, code, sign):
    marks = [1] * correct + [0] * (8 - correct)
    before = ares.update(ares.AresState(), stats(marks, [4] * 8))
    after = ares.update(before, stats(marks, [6] * correct + [8] * (8 - correct)))
    mean = (6 * correct + 8 * (8 - correct)) / 8
    assert after.alphas[code] == pytest.approx(0.5 + sign * 0.05 * (mean - 4) / 4)
    assert after.targets[code] == pytest.approx(0.9 * 4 + 0.1 * 6)
    assert [after.alphas[other] for other in range(3) if other != code] == [0.5, 0.5]


def test_small_buckets_and_buckets_without_correct_answers_set_no_target():
    few = ares.update(ares.AresState(), stats([1] * 7, [9] * 7, kl=9.0, p95=[1.0] * 7))
    assert few.difficulty_by_prompt == {"p": 0} and few.threshold == 1.0
    assert few.targets == (None,) * 3 and few.alphas == (0.5,) * 3 and few.lambdas == (0.0,) * 3
    wrong = ares.update(ares.AresState(), stats([0] * 8, [9] * 8))
    assert wrong.targets == (None,) * 3
    known = ares.AresState(targets=(1.0, 2.0, 4.0))
    moved = ares.update(known, stats([0] * 8, [2] * 8))
    assert moved.targets == known.targets
    assert moved.alphas == (0.5, 0.5, pytest.approx(0.5 + 0.05 * 2 / 4))


def test_update_does_not_modify_the_old_state():
    before = ares.AresState(difficulty_by_prompt={"q": 2})
    ares.update(before, stats([1] * 8, [3] * 8, kl=0.5, p95=[1.0] * 8))
    assert before == ares.AresState(difficulty_by_prompt={"q": 2})


@pytest.mark.parametrize(("correct", "code", "budget"), [(8, 0, 0.01), (4, 1, 0.02), (1, 2, 0.04)])
def test_lambda_rises_above_the_budget_and_falls_to_zero_below_it(correct, code, budget):
    marks = [1] * correct + [0] * (8 - correct)
    state = ares.AresState()
    for kl, want in ((budget + 0.5, 0.05), (budget, 0.05), (budget - 0.3, 0.02), (-9.0, 0.0)):
        state = ares.update(state, stats(marks, [1] * 8, kl=kl))
        assert state.lambdas[code] == pytest.approx(want)
        assert state.betas[code] == pytest.approx(0.01 + want)


@pytest.mark.parametrize(("hwe", "bound"), [(900, 2.0), (0, 0.0)])
def test_alpha_stays_in_its_range(hwe, bound):
    state = ares.AresState(targets=(50.0,) * 3)
    for _ in range(100):
        state = ares.update(state, stats([1] * 7 + [0], [50] * 7 + [hwe]))
    assert state.alphas[0] == bound


def test_unmeasured_kl_is_ignored():
    """Only the trajectories that are trained on have a KL, and eight of them are needed."""
    seen = stats([1] * 4 + [0] * 12, [1] * 16)
    kl_B = torch.full((16,), NAN, dtype=torch.float64)
    kl_B[:8] = 0.14
    moved = ares.update(ares.AresState(), replace(seen, kl_B=kl_B))
    assert moved.lambdas == pytest.approx((0.0, 0.0, 0.1 * (0.14 - 0.04)))
    kl_B[7] = NAN
    assert ares.update(moved, replace(seen, kl_B=kl_B)).lambdas == moved.lambdas
    shown = ares.metrics(
        moved, replace(seen, kl_B=kl_B), torch.full((16,), 2), ares.PAPER_HYPERPARAMS
    )
    assert shown["ares/hard/kl"] == pytest.approx(0.14)


def released_stats(prompt_ids, correct, hwe, kl=None):
    """Several groups without percentiles."""
    return ares.AresStats(
        prompt_ids=tuple(prompt_ids),
        correct_B=torch.tensor(correct),
        hwe_B=torch.tensor(hwe),
        p95_B=torch.full((len(prompt_ids),), float("nan")),
        kl_B=None if kl is None else torch.tensor(kl),
    )


def test_targets_and_alphas_are_those_of_the_released_code():
    state = ares.AresState()
    for step in GOLDEN["difficulty_target_alpha"]["steps"]:
        seen = released_stats(step["global_id"], step["accuracy"], step["n_hwe"])
        state = ares.update(state, seen, ares.RELEASED_HYPERPARAMS)
        names = {
            key: ares.DIFFICULTY_NAMES[code] for key, code in state.difficulty_by_prompt.items()
        }
        assert names == step["difficulty"]
        assert dict(zip(ares.DIFFICULTY_NAMES, state.targets, strict=True)) == step["target"]
        assert dict(zip(ares.DIFFICULTY_NAMES, state.alphas, strict=True)) == pytest.approx(
            step["alpha"]
        )


@pytest.mark.parametrize("case", GOLDEN["kl_beta"], ids=lambda case: f"every-{case['n_updates']}")
def test_the_kl_controller_is_that_of_the_released_code(case):
    wanted = {row["update"]: row for row in case["trace"]}
    controller = ares.ReleasedKLController()
    for number in range(1, case["n_updates"] + 1):
        switched = case["switch_at"] is not None and number > case["switch_at"]
        values = case["kl_values_last" if switched else "kl_values_first"]
        measured = {}
        for code, name in enumerate(ares.DIFFICULTY_NAMES):
            mine = [v for v, d in zip(values, case["difficulties"], strict=True) if d == name]
            if mine:
                measured[code] = sum(mine) / len(mine)
        controller = update_released_kl(controller, measured, interval=case["update_interval"])
        if number in wanted:
            row = wanted[number]
            for code, name in enumerate(ares.DIFFICULTY_NAMES):
                assert controller.betas[code] == pytest.approx(row["beta"][name], abs=1e-5)
                assert controller.errors[code] == pytest.approx(row["e_ema"][name], abs=1e-5)
                mean = controller.kl_means[code]
                assert (mean is None) == (row["ema_kl"][name] is None)
                assert mean is None or mean == pytest.approx(row["ema_kl"][name], abs=1e-5)


def test_weights_are_the_coefficient_times_beta_and_stay_in_the_dead_zone():
    state, seen = (
        ares.AresState(),
        released_stats(["a"] * 2, [1.0, 1.0], [1, 1], kl=[0.0101, 0.0101]),
    )
    for _ in range(200):
        state = ares.update(state, seen, ares.RELEASED_HYPERPARAMS)
    assert state.betas == (0.01, 0.01, 0.01) and state.released_kl.num_updates == 200
