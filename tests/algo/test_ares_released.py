"""`algo.ares.released`: golden traces, and an alpha that does not reach its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mega_agentrl.algo import ares
from mega_agentrl.algo.ares.released import update_kl
from mega_agentrl.algo.ares.reward import DIFFICULTY_NAMES
from mega_agentrl.algo.ares.state import ReleasedKLController

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "ares_controllers.json").read_text(encoding="utf-8")
)


def stats(prompt_ids, correct, hwe, kl=None):
    return ares.AresStats(
        prompt_ids=tuple(prompt_ids),
        correct_B=torch.tensor(correct),
        hwe_B=torch.tensor(hwe),
        p95_B=torch.full((len(prompt_ids),), float("nan")),
        kl_B=None if kl is None else torch.tensor(kl),
    )


def test_golden_targets_and_alphas():
    state = ares.AresState()
    for step in GOLDEN["difficulty_target_alpha"]["steps"]:
        seen = stats(step["global_id"], step["accuracy"], step["n_hwe"])
        state = ares.update(state, seen, ares.RELEASED_HYPERPARAMS)
        names = {key: DIFFICULTY_NAMES[code] for key, code in state.difficulty_by_prompt.items()}
        assert names == step["difficulty"]
        assert dict(zip(DIFFICULTY_NAMES, state.targets, strict=True)) == step["target"]
        assert dict(zip(DIFFICULTY_NAMES, state.alphas, strict=True)) == pytest.approx(
            step["alpha"]
        )


@pytest.mark.parametrize("case", GOLDEN["kl_beta"], ids=lambda case: f"every-{case['n_updates']}")
def test_golden_kl(case):
    wanted = {row["update"]: row for row in case["trace"]}
    controller = ReleasedKLController()
    for number in range(1, case["n_updates"] + 1):
        switched = case["switch_at"] is not None and number > case["switch_at"]
        values = case["kl_values_last" if switched else "kl_values_first"]
        measured = {}
        for code, name in enumerate(DIFFICULTY_NAMES):
            mine = [v for v, d in zip(values, case["difficulties"], strict=True) if d == name]
            if mine:
                measured[code] = sum(mine) / len(mine)
        controller = update_kl(controller, measured, interval=case["update_interval"])
        if number in wanted:
            row = wanted[number]
            for code, name in enumerate(DIFFICULTY_NAMES):
                assert controller.betas[code] == pytest.approx(row["beta"][name], abs=1e-5)
                assert controller.errors[code] == pytest.approx(row["e_ema"][name], abs=1e-5)
                mean = controller.kl_means[code]
                assert (mean is None) == (row["ema_kl"][name] is None)
                assert mean is None or mean == pytest.approx(row["ema_kl"][name], abs=1e-5)


def test_weights_are_the_coefficient_times_beta_and_stay_in_the_dead_zone():
    state, seen = ares.AresState(), stats(["a"] * 2, [1.0, 1.0], [1, 1], kl=[0.0101, 0.0101])
    for _ in range(200):
        state = ares.update(state, seen, ares.RELEASED_HYPERPARAMS)
    assert state.betas == (0.01, 0.01, 0.01) and state.released_kl.num_updates == 200


@pytest.mark.parametrize("code", [0, 2])
def test_the_released_alpha_does_not_move_the_count_towards_a_target(code):
    """Closed loop: the count of a bucket answers to alpha, yet stays where it was."""
    accuracy = [1.0, 1.0, 1.0, 1.0] if code == 0 else [0.0] * 4
    state = ares.AresState()
    for _ in range(100):
        natural = 20.0 - 8 * (state.alphas[code] - 0.5) * (1 if code == 0 else -1)
        state = ares.update(
            state, stats(["p"] * 4, accuracy, [natural] * 4), ares.RELEASED_HYPERPARAMS
        )
        assert abs(state.alphas[code] - 0.5) < 0.1
    assert abs(natural - 20.0) < 1.0
