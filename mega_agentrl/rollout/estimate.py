"""How far the top-k estimate of a token's entropy is from the exact one.

Released branching code reads entropies from the K most probable tokens that an engine lists;
`algo.branching.token_entropy_topk` counts the rest as one outcome. Here it is compared with the
engine's exact entropy where `rollout.branch.estimate_top_k` asks for it. Decides nothing.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.branching import token_entropy_topk

if TYPE_CHECKING:
    from mega_agentrl.types.records import Generation


class EntropyGap:
    """Of one trajectory's own tokens; `top_k` 0: nothing is compared."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._total = 0.0
        self._count = 0

    @property
    def mean(self) -> float | None:
        """Mean of |estimate - exact| in nats; None without a token."""
        return self._total / self._count if self._count else None

    def add(self, generation: Generation) -> None:
        """Count its tokens; without listed alternatives there is nothing to count."""
        if not self.top_k or not generation.top_logps:
            return
        rows = [sorted(row, reverse=True)[: self.top_k] for row in generation.top_logps]
        logprob_TK = torch.tensor(
            [[*row, *[-inf] * (self.top_k - len(row))] for row in rows], dtype=torch.float64
        )
        exact_T = torch.tensor(generation.entropies, dtype=torch.float64)
        self._total += float((token_entropy_topk(logprob_TK) - exact_T).abs().sum())
        self._count += len(rows)
