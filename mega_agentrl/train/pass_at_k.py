"""pass@k and mean@k of n answers to each question.

If c of a question's n answers are right, k of them drawn without replacement contain no right one
with probability C(n - c, k) / C(n, k), so

    pass@k = 1 - C(n - c, k) / C(n, k)

is unbiased for every k <= n (Chen et al., arXiv 2107.03374), and mean@n = c / n. Both are averaged
over questions. A question with fewer than k valid answers, because others failed for reasons of
our own, is left out of pass@k.
"""

from __future__ import annotations

from math import comb
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def pass_at_k(num_correct: int, num_answers: int, k: int) -> float:
    """Return the probability that one of k of the answers is right; 1 <= k <= num_answers."""
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def pass_at_k_metrics(is_correct: Sequence[Sequence[bool]], num_samples: int) -> dict[str, float]:
    """Return `pass@1`, `pass@2`, `pass@4`, ... up to num_samples, and `mean@<num_samples>`.

    Args:
        is_correct: For each question, whether each valid answer is right.
        num_samples: Answers per question. For a single one the result is empty, as success says the
            same.
    """
    if num_samples < 2:
        return {}
    metrics: dict[str, float] = {}
    k = 1
    while k <= num_samples:
        values = [pass_at_k(sum(one), len(one), k) for one in is_correct if len(one) >= k]
        if values:
            metrics[f"pass@{k}"] = fmean(values)
        k *= 2
    means = [fmean(map(float, one)) for one in is_correct if one]
    if means:
        metrics[f"mean@{num_samples}"] = fmean(means)
    return metrics
