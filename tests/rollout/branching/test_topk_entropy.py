"""Error of the top-k entropy estimate, by hand."""

import math

import pytest

from mega_agentrl.rollout.branching.topk_entropy import TopkEntropyGap
from mega_agentrl.types.records import FinishReason, Generation


def generation(top_logps, entropies):
    num = len(entropies)
    return Generation(
        request_id="r",
        token_ids=(1,) * num,
        logps=(-1.0,) * num,
        entropies=tuple(entropies),
        argmax_ids=(1,) * num,
        finish_reason=FinishReason.length,
        stop_string=None,
        version=0,
        top_logps=tuple(map(tuple, top_logps)),
    )


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


def test_all_alternatives_listed_is_exact():
    exact = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
    gap = TopkEntropyGap(3)
    gap.add(generation([logs(0.2, 0.5, 0.3)], [exact]))
    assert gap.mean == pytest.approx(0, abs=1e-12)


def test_the_rest_counts_as_one_outcome_and_the_sampled_token_beyond_k_not_at_all():
    # Exact: 0.5 and five times 0.1; the estimate from two: 0.5, 0.1 and 0.4 together.
    exact = -(0.5 * math.log(0.5) + 5 * 0.1 * math.log(0.1))
    estimate = -(0.5 * math.log(0.5) + 0.1 * math.log(0.1) + 0.4 * math.log(0.4))
    gap = TopkEntropyGap(2)
    gap.add(generation([logs(0.1, 0.5, 0.1)], [exact]))
    assert gap.mean == pytest.approx(exact - estimate)
    gap.add(generation([logs(1.0)], [0.0]))
    assert gap.mean == pytest.approx((exact - estimate) / 2)


def test_nothing_to_compare():
    gap = TopkEntropyGap(0)
    gap.add(generation([logs(1.0)], [9.0]))
    assert gap.mean is None
    asked = TopkEntropyGap(2)
    asked.add(generation([], [9.0]))
    assert asked.mean is None
