"""`algo.ares.reward`: golden rows, bounds and directions, and KL weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.ares import reward as ares_reward
from mega_agentrl.algo.ares.reward import (
    DIFFICULTY_NAMES,
    difficulty,
    entropy_reward,
    token_kl_weight,
)
from mega_agentrl.algo.masking import masked_mean

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "ares_reward.json").read_text(encoding="utf-8"))
FILTER = json.loads((FOLDER / "ares_online_filter.json").read_text(encoding="utf-8"))
CONTROL = json.loads((FOLDER / "ares_controllers.json").read_text(encoding="utf-8"))


def reward_of(rows, rule="released"):
    """rows: (difficulty code, correct, hwe, target, alpha)."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    code, correct, hwe, target, alpha = columns
    return entropy_reward(correct, hwe, target, alpha, code, rule=rule)


def test_golden_rows():
    rows = GOLDEN["rows"]
    assert len(rows) == 430
    codes = {name: code for code, name in enumerate(DIFFICULTY_NAMES)} | {"unknown": -1}
    got = reward_of([(codes[name], *rest[:4]) for name, *rest in rows])
    assert got.tolist() == pytest.approx([row[5] for row in rows], abs=1e-6)
    overall = got + torch.tensor([row[1] for row in rows])
    assert overall.tolist() == pytest.approx([row[6] for row in rows], abs=1e-6)


def test_golden_helpers_and_defaults():
    for x, kappa, want in GOLDEN["helpers"]["huber"]:
        assert ares_reward.huber(torch.tensor([x]), kappa).item() == pytest.approx(want, abs=1e-6)
    for target, share, want in GOLDEN["helpers"]["margin"]:
        got = ares_reward.margin(torch.tensor([target]), share)
        assert got.item() == pytest.approx(want, abs=1e-6)
    for x, temperature, want in GOLDEN["helpers"]["sigmoid"]:
        code = ares_reward.SATURATION_TEMPERATURE.index(temperature)
        # A wrong answer x above a margin of 1 earns its share of the cap times the sigmoid.
        if x >= 0:
            paid = reward_of([(code, 0, 1 + x, 0, 1.0)]).item()
            scale = ares_reward.WRONG_CAP_FACTOR[code] * ares_reward.CAP_FACTOR[code]
            assert paid / scale == pytest.approx(want, abs=1e-6)
    right, wrong = reward_of([(0, 1, 0, 0, 0.5), (0, 0, 0, 0, 0.5)]).tolist()
    want = GOLDEN["defaults_missing_fields"]
    assert right == want["correct"]["high_entropy_token_num_score"]
    assert wrong == pytest.approx(want["wrong"]["high_entropy_token_num_score"])


@pytest.mark.parametrize("case", FILTER["cases"], ids=lambda case: case["name"])
def test_golden_shaped_scores_that_the_released_filter_saw(case):
    rows = [(0, a, n, 0, 0.5) for a, n in zip(case["accuracy"], case["n_hwe"], strict=True)]
    accuracy = torch.tensor(case["accuracy"], dtype=torch.float64)
    overall = accuracy + reward_of(rows)
    assert overall.tolist() == pytest.approx(case["overall_seen_by_filter"], abs=1e-6)
    assert overall.mean().item() == pytest.approx(case["mean"], abs=1e-6)
    assert (0.01 < overall.mean().item() < 0.99) is case["kept_by_shipped_config"]
    assert (0.01 < accuracy.mean().item() < 0.99) is case["kept_if_filter_key_were_accuracy"]


@pytest.mark.parametrize(
    ("code", "correct", "hwe", "overall"),
    [
        (0, 1, 12, 0.991071),
        (0, 1, 14, 0.785714),
        (0, 1, 20, 0.5),
        (0, 0, 0, 0.15),
        (0, 0, 20, 0.295781),
        (1, 1, 0, 0.5),
        (1, 1, 5, 0.905303),
        (1, 0, 20, 0.381030),
        (2, 1, 5, 0.98875),
        (2, 1, 8, 1.373476),
        (2, 1, 20, 1.593408),
        (2, 0, 0, 0.3),
        (2, 0, 60, 0.6),
    ],
)
def test_cases_by_hand(code, correct, hwe, overall):
    got = correct + reward_of([(code, correct, hwe, 10, 0.5)]).item()
    assert got == pytest.approx(overall, abs=1e-5)


CODES = st.integers(0, 2)
COUNTS = st.integers(0, 60)
ALPHAS = st.floats(0, 2)


@given(
    CODES,
    st.booleans(),
    COUNTS,
    st.floats(0, 40),
    ALPHAS,
    st.sampled_from(ares_reward.REWARD_RULES),
)
def test_reward_is_within_the_cap(code, correct, hwe, target, alpha, rule):
    got = reward_of([(code, correct, hwe, target, alpha)], rule).item()
    assert abs(got) <= alpha * ares_reward.CAP_FACTOR[code] + 1e-12
    if not correct:
        assert got >= 0


@given(
    CODES,
    st.booleans(),
    COUNTS,
    st.floats(0, 40),
    ALPHAS,
    st.sampled_from(ares_reward.REWARD_RULES),
)
def test_reward_is_monotonic_in_the_number_of_windows(code, correct, hwe, target, alpha, rule):
    less, more = reward_of(
        [(code, correct, hwe, target, alpha), (code, correct, hwe + 1, target, alpha)], rule
    ).tolist()
    falls = correct and (code == 0 or (code == 1 and hwe >= target))
    rises = not correct or code == 2 or (code == 1 and hwe + 1 <= target)
    if falls:
        assert more <= less + 1e-12
    elif rises:
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
    assert reward_of([(-1, 0, 9, 1, 0.5), (3, 1, 9, 1, 0.5), (0, 0, 9, nan, 0.5)]).tolist() == [
        0.0,
        0.0,
        0.0,
    ]
    half = torch.full((1,), 0.5)
    got = entropy_reward(torch.tensor([True]), torch.tensor([3]), half, half, torch.tensor([0]))
    assert got.dtype == torch.float32


def test_golden_difficulties():
    for step in CONTROL["difficulty_target_alpha"]["steps"]:
        names = step["global_id"]
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        group = torch.tensor([number[name] for name in names])
        code = difficulty(torch.tensor(step["accuracy"]), group)
        for name, got in zip(names, code.tolist(), strict=True):
            assert DIFFICULTY_NAMES[got] == step["difficulty"][name]


def test_difficulty_at_the_edges_and_alone():
    accuracy = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0])
    group = torch.tensor([7, 7, 7, 3, 3, 3, 5, 5, 5, 9, 2, 2, 2])
    assert difficulty(accuracy, group).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    assert difficulty(accuracy.bool(), group).tolist() == difficulty(accuracy, group).tolist()


@pytest.mark.parametrize("case", CONTROL["token_level_kl_paper"])
def test_golden_kl_weights(case):
    inside = torch.tensor([case["hwe_mask"]])
    weight = token_kl_weight(inside, torch.tensor([case["beta_d"]]), rho=case["rho"])
    assert weight[0].tolist() == pytest.approx(case["weights"])
    mean = masked_mean(weight * torch.tensor([case["kl"]]), torch.ones_like(inside))
    assert mean.item() == pytest.approx(case["weighted_mean"])


@given(st.lists(st.floats(0, 3), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 99))
def test_kl_weights_average_to_beta_by_the_share_of_windows(beta, rho, seed):
    inside = torch.rand(len(beta), 20, generator=torch.Generator().manual_seed(seed)) < 0.4
    beta_B = torch.tensor(beta, dtype=torch.float64)
    weight = token_kl_weight(inside, beta_B, rho=rho)
    share = inside.double().mean(1)
    torch.testing.assert_close(weight.mean(1), beta_B * (1 - (1 - rho) * share))


def test_bad_input():
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(ValueError, match=r"correct_B \(1,\), hwe_B \(2,\)"):
        entropy_reward(one, two, one, one, one)
    with pytest.raises(ValueError, match="rule=paper: expected one of released, centred"):
        entropy_reward(one, one, one, one, one, rule="paper")
    with pytest.raises(ValueError, match=r"accuracy_B \(1,\), group_B \(2,\)"):
        difficulty(one, two)
    with pytest.raises(ValueError, match="expected as many rows"):
        token_kl_weight(torch.ones(3, 2), two)
