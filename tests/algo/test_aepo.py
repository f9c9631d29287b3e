"""`algo.aepo`: golden rows, numbers by hand, the range of the number of roots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.aepo import branch_penalty, entropy_scaled, initial_rollouts
from mega_agentrl.algo.policy_loss import aggregate, clipped
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("aepo")


@pytest.mark.parametrize("case", GOLDEN["initial_rollouts"])
def test_the_number_of_initial_rollouts_is_that_of_the_released_code(case):
    got = initial_rollouts(case["n"], case["H_root"], case["H_tool_avg"])
    assert got == case["initial_rollouts_code"]
    assert got == min(max(int(case["m_paper_real"]) + 1, 1), case["n"])


@pytest.mark.parametrize("case", GOLDEN["branch"])
def test_the_penalized_fork_score_is_that_of_the_released_code(case):
    coin = case["u"] + case["w"] * case["delta"]
    score = min(max(coin * branch_penalty(case["consecutive"]), 0.0), 1.0)
    assert score == pytest.approx(case["score"])
    assert (score >= case["bp"]) is case["branch"]


@pytest.mark.parametrize("case", GOLDEN["loss"])
def test_losses_and_gradients_are_those_of_the_released_code(case):
    new = torch.tensor([case["new"]], requires_grad=True)
    old, advantage, entropy = (torch.tensor([case[key]]) for key in ("old", "adv", "entropy"))
    mask = torch.ones_like(old)
    if case["adv_balanced"]:
        advantage = entropy_scaled(advantage, entropy, mask)
    loss_BT, _ = clipped(
        new,
        old,
        advantage,
        mask,
        clip_low=case["eps_low"],
        clip_high=case["eps_high"],
        clip_dual=3.0,
        balanced=case["clip_balanced"],
    )
    loss = aggregate(loss_BT, mask, "token_mean")
    loss.backward()
    assert loss_BT[0].tolist() == pytest.approx(case["per_token"], abs=1e-5)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    assert new.grad[0].tolist() == pytest.approx(case["grad"], abs=1e-5)


def test_advantages_grow_with_the_deviation_of_the_entropy():
    # Entropies 1, 2, 3: mean 2, unbiased std 1, z -1, 0, 1; the fourth token is masked.
    advantage = torch.tensor([[1.0, -1.0, 2.0, 5.0]])
    entropy = torch.tensor([[1.0, 2.0, 3.0, float("nan")]], requires_grad=True)
    got = entropy_scaled(advantage, entropy, torch.tensor([[1, 1, 1, 0]]), weight=0.5)
    assert got.tolist() == [[0.5, -1.0, 3.0, 0.0]]
    assert not got.requires_grad


@pytest.mark.parametrize("mask", [[[1, 1]], [[1, 0]], [[0, 0]]])
def test_equal_entropies_scale_nothing(mask):
    got = entropy_scaled(torch.ones(1, 2), torch.full((1, 2), 3.0), torch.tensor(mask))
    assert got.tolist() == torch.tensor(mask).float().tolist()


@given(st.integers(1, 64), st.floats(0, 12), st.floats(0, 12), st.floats(0, 5))
def test_more_roots_for_a_higher_question_entropy(n, h_root, h_tool, more):
    few = initial_rollouts(n, h_root, h_tool)
    assert 1 <= few <= initial_rollouts(n, h_root + more, h_tool) <= n


def test_each_consecutive_fork_takes_a_twentieth_of_the_probability():
    assert [branch_penalty(count) for count in (0, 1, 10, 20, 99)] == [1.0, 0.95, 0.5, 0.0, 0.0]
    assert branch_penalty(2, rate=0.25) == 0.5 and branch_penalty(50, rate=0) == 1.0


def test_no_trajectories_are_refused():
    with pytest.raises(InputError) as caught:
        initial_rollouts(0, 1.0, 1.0)
    assert (caught.value.name, caught.value.got) == ("n", 0)
