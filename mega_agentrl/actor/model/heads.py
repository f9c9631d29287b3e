"""Output heads of the last pipeline stage: log-probs and entropies, or one value per token.

A head maps a micro-batch and the hidden states after the final norm to `[R, T]` tensors, which
the objective or the caller of a forward-only pass receives.

Shape suffixes: R rows of the micro-batch, T response positions, S packed tokens, N evaluated
tokens, a shared one counted once, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mega_agentrl.actor.vocab.vocab_parallel import VocabShard, logp_and_entropy

if TYPE_CHECKING:
    from mega_agentrl.actor.model.gpt_model import GPTModelChunk
    from mega_agentrl.actor.training.packing import MicroBatch


class OutputHead(Protocol):
    """Maps a micro-batch and its `[S, 1, D]` hidden states to `[R, T]` tensors."""

    def __call__(
        self, model: GPTModelChunk, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return `[R, T]` tensors, 0 at positions that were not selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbHead:
    """Log-prob and entropy of each selected token."""

    temperature: float
    vocab_shard: VocabShard
    num_positions: int
    """T, the number of response positions."""

    def __call__(
        self, model: GPTModelChunk, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[R, T]` float32 log-probs and entropies (nats)."""
        hidden_ND = hidden_S1D.squeeze(1).index_select(0, micro.predict_N)
        logp_N, entropy_N = logp_and_entropy(
            hidden_ND,
            model.output_weight(),
            micro.target_N,
            self.temperature,
            self.vocab_shard,
            micro.predicted_of_ranks,
        )
        width = self.num_positions
        return micro.to_rows(logp_N, width), micro.to_rows(entropy_N, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarHead:
    """One value per selected token, from the hidden state that predicts the token.

    Every tensor rank holds the whole weight and processes all tokens, so each computes the full
    values and the full gradients of weight and hidden states; nothing is summed over tensor
    ranks.
    """

    num_positions: int
    """T, the number of response positions."""

    def __call__(
        self, model: GPTModelChunk, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Return the `[R, T]` float32 values."""
        hidden_ND = hidden_S1D.squeeze(1).index_select(0, micro.predict_N)
        value_N = hidden_ND.float() @ model.output_weight().float().squeeze(0)
        return (micro.to_rows(value_N, self.num_positions),)
