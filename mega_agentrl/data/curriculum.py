"""Weights prompts by how often the policy answers them correctly (`data.order=difficulty`).

A group that is entirely correct or entirely wrong has no advantage to learn from, and the learning
signal is largest near an accuracy p of 1/2. Each prompt's weight is that of its file times its
learnability

    f(p) = max(MIN_LEARNABILITY, 4 p (1 - p)),        1 for a prompt without a recorded accuracy,

scaled so that the length of an epoch does not change. p (1 - p) is used by Rutherford et al. (arXiv
2408.15099) and, for language models, by Foster et al. (arXiv 2502.12272). The minimum brings
mastered and hopeless prompts back from time to time, since p is an old estimate from one group. p
is that of the last visit and takes effect in the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

MIN_LEARNABILITY = 0.1
"""Minimum learnability: prompts with p = 0 or 1 still come about every tenth epoch."""


def learnability_weights(base: Sequence[float], accuracies: Mapping[int, float]) -> list[float]:
    """Return the weights of the next epoch, which have the same sum as `base`.

    Args:
        base: weight of each prompt's file.
        accuracies: recorded accuracies in [0, 1] by prompt index.
    """
    base_N = np.asarray(base, dtype=np.float64)
    learnability_N = np.ones_like(base_N)
    for index, accuracy in accuracies.items():
        learnability_N[index] = max(MIN_LEARNABILITY, 4 * accuracy * (1 - accuracy))
    weight_N = base_N * learnability_N
    weights: list[float] = (weight_N * (base_N.sum() / weight_N.sum())).tolist()
    return weights
