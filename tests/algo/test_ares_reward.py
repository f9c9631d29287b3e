"""`algo.ares.reward`: golden rows, bounds and directions, and KL weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.ares.reward import (
    CAP_FACTOR,
    DIFFICULTY_NAMES,
    REWARD_RULES,
    difficulty,
    entropy_reward,
    token_kl_weight,
)
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("ares_reward")
FILTER = load_golden("ares_online_filter")
CONTROL = load_golden("ares_controllers")


def reward_of(rows, rule="released"):
    """rows: (difficulty code, correct, hwe, target, alpha)."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    code, correct, hwe, target, alpha = columns
    return entropy_reward(correct, hwe, target, alpha, code, rule=rule)


def test_rewards_are_those_of_the_released_code():
    rows = GOLDEN["rows"]
    assert len(rows) == 430
    codes = {name: code for code, name in enumerate(DIFFICULTY_NAMES)} | {"unknown": -1}
    got = reward_of([(codes[name], *rest[:4]) for name, *rest in rows])
    assert got.tolist() == pytest.approx([row[5] for row in rows], abs=1e-6)
    overall = got + torch.tensor([row[1] for row in rows])
    assert overall.tolist() == pytest.approx([row[6] for row in rows], abs=1e-6)


@pytest.mark.parametrize("case", FILTER["cases"], ids=lambda case: case["name"])
def test_shaped_scores_are_those_that_the_released_filter_saw(case):
    rows = [(0, a, n, 0, 0.5) for a, n in zip(case["accuracy"], case["n_hwe"], strict=True)]
    accuracy = torch.tensor(case["accuracy"], dtype=torch.float64)
    overall = accuracy + reward_of(rows)
    assert overall.tolist() == pytest.approx(case["overall_seen_by_filter"], abs=1e-6)
    assert overall.mean().item() == pytest.approx(case["mean"], abs=1e-6)
    assert (0.01 < overall.mean().item() < 0.99) is case["kept_by_shipped_config"]
    assert (0.01 < accuracy.mean().item() < 0.99) is case["kept_if_filter_key_were_accuracy"]


@given(
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 60),
    st.floats(0, 40),
    st.floats(0, 2),
    st.sampled_from(REWARD_RULES),
)
def test_reward_is_within_the_cap_and_monotonic_in_the_number_of_windows(
    code, correct, hwe, target, alpha, rule
):
    less, more = reward_of(
        [(code, correct, hwe, target, alpha), (code, correct, hwe + 1, target, alpha)], rule
    ).tolist()
    assert abs(less) <= alpha * CAP_FACTOR[code] + 1e-12
    assert correct or less >= 0
    if correct and (code == 0 or (code == 1 and hwe >= target)):
        assert more <= less + 1e-12
    elif not correct or code == 2 or (code == 1 and hwe + 1 <= target):
        assert more >= less - 1e-12


def test_centred_rule_is_zero_without_exploration_and_continuous():
    idle = reward_of([(code, 0, 0, 10, 0.5) for code in range(3)], "centred")
    assert idle.tolist() == [0.0, 0.0, 0.0]
    below, at = reward_of([(2, 1, 6.5 - 1e-9, 10, 0.5), (2, 1, 6.5, 10, 0.5)], "centred").tolist()
    assert at == 0.0 and below == pytest.approx(0.0, abs=1e-6)
    released = reward_of([(2, 1, 6.5, 10, 0.5)])
    assert released.item() == pytest.approx(0.3)
    far = reward_of([(0, 0, 1000, 10, 0.5), (1, 0, 1000, 10, 0.5)], "centred")
    assert far.tolist() == pytest.approx([0.3, 0.4])


def test_unknown_difficulty_or_target_gives_zero():
    nan = float("nan")
    rows = [(-1, 0, 9, 1, 0.5), (3, 1, 9, 1, 0.5), (0, 0, 9, nan, 0.5)]
    assert reward_of(rows).tolist() == [0.0] * 3


def test_rewards_are_float32_unless_alpha_is_float64():
    half = torch.full((1,), 0.5)
    got = entropy_reward(torch.tensor([True]), torch.tensor([3]), half, half, torch.tensor([0]))
    assert got.dtype == torch.float32


def test_difficulty_counts_the_edges_as_easier_and_works_for_one_trajectory():
    accuracy = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0])
    group = torch.tensor([7, 7, 7, 3, 3, 3, 5, 5, 5, 9, 2, 2, 2])
    assert difficulty(accuracy, group).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    assert difficulty(accuracy.bool(), group).tolist() == difficulty(accuracy, group).tolist()


@pytest.mark.parametrize("case", CONTROL["token_level_kl_paper"])
def test_kl_weights_are_those_of_the_released_code(case):
    inside = torch.tensor([case["hwe_mask"]])
    weight = token_kl_weight(inside, torch.tensor([case["beta_d"]]), rho=case["rho"])
    assert weight[0].tolist() == pytest.approx(case["weights"])
    mean = masked_mean(weight * torch.tensor([case["kl"]]), torch.ones_like(inside))
    assert mean.item() == pytest.approx(case["weighted_mean"])


def test_an_unknown_rule_is_refused():
    with pytest.raises(InputError) as caught:
        reward_of([(0, 0, 0, 0, 0.5)], "paper")
    assert (caught.value.name, caught.value.got) == ("rule", "paper")
