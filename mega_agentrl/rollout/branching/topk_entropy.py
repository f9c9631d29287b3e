"""Error of the top-k estimate of token entropies.

Released branching code estimates entropies from the K most probable tokens that an engine lists;
`algo.branching.token_entropy_topk` treats the remaining probability as one outcome. If
`rollout.branch.entropy_estimate_top_k` is set, the estimate is compared with the engine's exact
entropy. This is a measurement only and does not affect branching.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.branching import token_entropy_topk

if TYPE_CHECKING:
    from mega_agentrl.types.records import Generation


class TopkEntropyGap:
    """Accumulates the estimation error over the tokens of a trajectory; `top_k` 0 disables it."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._gap_sum = 0.0
        self._num_tokens = 0

    @property
    def mean(self) -> float | None:
        """Mean of |estimate - exact| in nats; None without tokens."""
        return self._gap_sum / self._num_tokens if self._num_tokens else None

    def add(self, generation: Generation) -> None:
        """Add the tokens of a generation; it is skipped if it has no `top_logps`."""
        if not self.top_k or not generation.top_logps:
            return
        rows = [sorted(row, reverse=True)[: self.top_k] for row in generation.top_logps]
        logprob_TK = torch.tensor(
            [[*row, *[-inf] * (self.top_k - len(row))] for row in rows], dtype=torch.float64
        )
        exact_T = torch.tensor(generation.entropies, dtype=torch.float64)
        self._gap_sum += float((token_entropy_topk(logprob_TK) - exact_T).abs().sum())
        self._num_tokens += len(rows)
