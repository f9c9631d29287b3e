"""`algo.branching`: golden rows of the entropies and of both decision rules."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo import branching
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("arpo_entropy_and_branch")


@pytest.mark.parametrize("case", GOLDEN["entropy"], ids=lambda case: case["name"])
def test_entropies_are_those_of_the_released_code(case):
    logprob = torch.tensor(case["logprobs_per_token"], dtype=torch.float64)
    got = branching.released_segment_entropy(logprob, case["vocab_size"])
    assert got == pytest.approx(case["H_reference"], abs=1e-9)
    mean = branching.token_entropy_topk(logprob).mean().item()
    assert mean == pytest.approx(case["mean_tail_corrected_nats"], abs=1e-6)


def test_decisions_are_those_of_the_released_code():
    assert len(GOLDEN["branch_table"]) > 400
    for probability, weight, delta, u, _, expected in GOLDEN["branch_table"]:
        got = branching.released_should_branch(
            u, delta, branch_probability=probability, entropy_weight=weight
        )
        assert got is bool(expected), (probability, weight, delta, u)


@pytest.mark.parametrize("case", GOLDEN["probability_table"])
def test_the_fraction_of_draws_that_fork_is_that_of_the_released_code(case):
    draws = [(index + 0.5) / 2000 for index in range(2000)]
    share = sum(
        branching.released_should_branch(
            u, case["delta"], branch_probability=case["bp"], entropy_weight=case["w"]
        )
        for u in draws
    ) / len(draws)
    assert share == pytest.approx(case["P_branch"], abs=1e-3)


@pytest.mark.parametrize("case", GOLDEN["paper_rule"])
def test_the_rule_of_the_paper_gives_the_recorded_probabilities(case):
    p = branching.branch_probability(case["dH"], alpha=case["alpha"], beta=case["beta"])
    assert p == pytest.approx(case["P"])
    assert branching.should_branch(p, tau=case["tau"]) is case["branch"]


def test_entropy_counts_the_rest_of_the_probability_as_one_outcome():
    half = torch.tensor([[0.5, 0.25]]).log()
    exact = -(0.5 * torch.tensor(0.5).log() + 2 * 0.25 * torch.tensor(0.25).log())
    assert branching.token_entropy_topk(half)[0].item() == pytest.approx(exact.item(), abs=1e-6)
    absent = torch.tensor([[0.0, float("-inf")]])
    assert branching.token_entropy_topk(absent).tolist() == [0.0]


def test_a_vocabulary_of_one_token_is_refused():
    with pytest.raises(InputError) as caught:
        branching.released_segment_entropy(torch.zeros(1, 1), 1)
    assert (caught.value.name, caught.value.got) == ("vocab_size", 1)
