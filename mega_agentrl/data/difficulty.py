"""Weights of prompts by how often the policy answers them (`data.order=difficulty`).

A group of which all or none are correct has no advantage to learn from; what it teaches is
largest near an accuracy p of 1/2. Prompts are weighed by their learnability

    f(p) = max(FLOOR, 4 p (1 - p)),        1 for a prompt that was not seen yet,

p(1 - p) as in Rutherford et al. (arXiv 2408.15099) and, for language models, Foster and others
(arXiv 2502.12272), times the weight of the file, scaled so that an epoch stays as long as it is.
The floor brings back what was mastered or hopeless, as p is a guess from one group, sampled
long ago. p is of the last visit; it counts from the next epoch on: within one, every prompt still
comes its number of times, so that nothing starves and the rest of the epoch is known.

Deterministic: the weights follow from the accuracies that were recorded, in whatever order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

FLOOR = 0.1
"""Share of the largest weight: what never varies still comes about every tenth epoch."""


def difficulty_weights(base: Sequence[float], accuracies: Mapping[int, float]) -> list[float]:
    """The weights of the next epoch; their sum is that of `base`.

    base: of the prompts' files. accuracies: in [0, 1] by index, of those that were seen.
    """
    base_N = np.asarray(base, dtype=np.float64)
    worth_N = np.ones_like(base_N)
    for index, accuracy in accuracies.items():
        worth_N[index] = max(FLOOR, 4 * accuracy * (1 - accuracy))
    weight_N = base_N * worth_N
    weights: list[float] = (weight_N * (base_N.sum() / weight_N.sum())).tolist()
    return weights
