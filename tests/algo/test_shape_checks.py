"""Shapes that do not fit: what the error names, and that every function of `algo` rejects them."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo import advantage, aepo, ares, branching, egpo, kl, mastery, policy_loss
from mega_agentrl.algo.correction import importance_weights, logprob_mismatch
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.algo.shape_checks import check_rank, check_same_rows, check_same_shape
from mega_agentrl.algo.value_loss import clipped_value_loss, explained_variance
from mega_agentrl.errors import InputError
from tests.config.refusals import refused_input

# Torch would broadcast ONE to TWO and CELL to GRID.
ONE, TWO = torch.ones(1), torch.ones(2)
CELL, GRID, WIDE = torch.ones(1, 1), torch.ones(1, 2), torch.ones(1, 3)
RANGE = {"clip_low": 0.2, "clip_high": 0.2}
FUTURE = {
    **{"clip_dual": 3.0, "gamma": 1.0, "bound": 0.2, "high_only": True},
    **{"weight": 1.0, "max_penalized_ratio": 4.0},
}
CORRECTION = {"level": "token", "mode": "masked", "cap": 2.0}
MARKERS = {"start_id": 1, "end_id": 2}


def test_fitting_shapes_pass():
    check_rank(reward_B=torch.zeros(3), logprob_TK=torch.zeros(2, 4))
    check_same_shape(logp_BT=torch.zeros(2, 3), mask_BT=torch.ones(2, 3))
    check_same_rows(torch.zeros(2), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("check", "name", "got", "expected"),
    [
        pytest.param(lambda: check_rank(logp_BT=ONE), "logp_BT", (1,), "2 axes [B, T]", id="rank"),
        pytest.param(
            lambda: check_same_shape(reward_B=GRID, group_B=TWO),
            "reward_B",
            (1, 2),
            "1 axes [B]; the other tensors are group_B (2,)",
            id="rank of one of two",
        ),
        pytest.param(
            lambda: check_same_shape(logp_BT=GRID, mask_BT=WIDE),
            "logp_BT, mask_BT",
            "logp_BT (1, 2), mask_BT (1, 3)",
            "one shape for all of these",
            id="sizes",
        ),
        pytest.param(
            lambda: check_same_rows(TWO, GRID),
            "rows of two tensors",
            "[B] of shape (2,) and [B, T] of shape (1, 2)",
            "equal numbers",
            id="rows",
        ),
        pytest.param(
            lambda: check_same_rows(TWO, ONE),
            "grid_BT",
            (1,),
            "2 axes [B, T]; the other tensors are row_B (2,)",
            id="rank of rows",
        ),
    ],
)
def test_the_error_names_tensors_and_shapes(check, name, got, expected):
    error = refused_input(check)
    assert (error.name, error.got, error.expected) == (name, got, expected)


CALLS = {
    "grpo": lambda: advantage.grpo(ONE, TWO),
    "rloo": lambda: advantage.rloo(GRID, GRID),
    "remax": lambda: advantage.remax(ONE, TWO),
    "reinforce_plus_plus": lambda: advantage.reinforce_plus_plus(GRID, WIDE),
    "gae": lambda: advantage.gae(GRID, CELL, GRID, gamma=0.9, lam=0.8),
    "broadcast": lambda: advantage.broadcast(TWO, GRID),
    "arpo_hard, ids": lambda: advantage.arpo_hard(ONE, GRID, WIDE),
    "arpo_hard, rows": lambda: advantage.arpo_hard(TWO, GRID, GRID),
    "entropy_scaled": lambda: aepo.entropy_scaled(GRID, CELL, GRID),
    "entropy_scaled, rank": lambda: aepo.entropy_scaled(TWO, TWO, TWO),
    "token_entropy_topk": lambda: branching.token_entropy_topk(TWO),
    "released_segment_entropy": lambda: branching.released_segment_entropy(TWO, 9),
    "importance_weights": lambda: importance_weights(CELL, GRID, CELL, **CORRECTION),
    "logprob_mismatch": lambda: logprob_mismatch(CELL, GRID, CELL),
    "egpo": lambda: egpo.egpo(ONE, TWO),
    "cot_mask": lambda: egpo.cot_mask(GRID, WIDE, **MARKERS),
    "cot_entropy": lambda: egpo.cot_entropy(GRID, WIDE),
    "kl_penalty": lambda: kl.kl_penalty(CELL, GRID, "k1"),
    "apply_kl_penalty": lambda: kl.apply_kl_penalty(CELL, GRID, CELL, coef=0.1),
    "masked_mean": lambda: masked_mean(ONE, TWO),
    "mastery": lambda: mastery.update(mastery.MasteryState(), ["a"], ONE, TWO),
    "clipped": lambda: policy_loss.clipped(GRID, CELL, GRID, GRID, **RANGE),
    "clipped, mask": lambda: policy_loss.clipped(GRID, GRID, GRID, WIDE, **RANGE),
    "gspo": lambda: policy_loss.gspo(GRID, CELL, ONE, GRID, **RANGE),
    "gspo, rows": lambda: policy_loss.gspo(GRID, GRID, TWO, GRID, **RANGE),
    "atpo": lambda: policy_loss.atpo(GRID, CELL, GRID, GRID, **RANGE),
    "future_kl": lambda: policy_loss.future_kl(GRID, CELL, GRID, GRID, **RANGE, **FUTURE),
    "cispo": lambda: policy_loss.cispo(GRID, CELL, GRID, GRID, **RANGE),
    "aggregate": lambda: policy_loss.aggregate(TWO, TWO, "token_mean"),
    "clipped_value_loss": lambda: clipped_value_loss(GRID, GRID, CELL, GRID, clip=0.5),
    "explained_variance": lambda: explained_variance(TWO, TWO, TWO),
    "entropy_reward": lambda: ares.entropy_reward(ONE, TWO, ONE, ONE, ONE),
    "difficulty": lambda: ares.difficulty(ONE, TWO),
    "token_kl_weight": lambda: ares.token_kl_weight(WIDE, TWO),
    "window_entropy": lambda: ares.window_entropy(GRID, WIDE),
    "hwe_count": lambda: ares.hwe_count(GRID, CELL, threshold=0),
    "soft_cost": lambda: ares.soft_cost(GRID, CELL, threshold=0),
    "hwe_mask": lambda: ares.hwe_mask(TWO, threshold=0),
    "threshold_p95": lambda: ares.threshold_p95(GRID, WIDE),
    "update_threshold": lambda: ares.update_threshold(ares.AresState(), GRID),
    "difficulty_codes": lambda: ares.AresState().difficulty_codes(["a", "b"], ONE),
    "AresStats": lambda: ares.AresStats(
        prompt_ids=("a",), correct_B=ONE, hwe_B=ONE, p95_B=ONE, kl_B=TWO
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_rejects_shapes_that_do_not_fit(name):
    with pytest.raises(InputError):
        CALLS[name]()
