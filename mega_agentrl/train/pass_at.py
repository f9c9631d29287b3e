"""How often at least one of k answers is right, and how often one answer is, from n answers.

With c of a question's n answers right, k of them drawn without replacement hold none that is
right with probability C(n - c, k) / C(n, k), so

    pass@k = 1 - C(n - c, k) / C(n, k)

is unbiased for every k <= n (Chen et al., arXiv 2107.03374), and mean@n = c / n. Both are means
over questions. A question with fewer than k answers that count, as others failed through our own
fault, says nothing about pass@k.
"""

from __future__ import annotations

from math import comb
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def pass_at(num_right: int, num_answers: int, k: int) -> float:
    """Probability that one of k of the answers is right; 1 <= k <= num_answers."""
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def pass_metrics(right: Sequence[Sequence[bool]], num_samples: int) -> dict[str, float]:
    """`pass@1`, `pass@2`, `pass@4`, ... up to num_samples, and `mean@<num_samples>`.

    right: for each question, whether each answer that counts is right. Empty for one sample, of
    which success says the same; without a k that no question has answers for.
    """
    if num_samples < 2:
        return {}
    found: dict[str, float] = {}
    k = 1
    while k <= num_samples:
        values = [pass_at(sum(one), len(one), k) for one in right if len(one) >= k]
        if values:
            found[f"pass@{k}"] = fmean(values)
        k *= 2
    means = [fmean(map(float, one)) for one in right if one]
    if means:
        found[f"mean@{num_samples}"] = fmean(means)
    return found
