"""What the last stage makes of hidden states: log-probs and entropies, or one value a token.

A head maps a micro-batch and the hidden states of the last norm to [R, T] tensors; what to do
with them (a loss, or handing them back) is decided elsewhere. R rows of the micro-batch, T
response positions, S packed tokens, N tokens that are looked at, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mega_agentrl.actor.vocab_parallel import VocabShard, logp_and_entropy

if TYPE_CHECKING:
    from mega_agentrl.actor.model import PolicyModel
    from mega_agentrl.actor.packing import MicroBatch


class Head(Protocol):
    """Maps a micro-batch and its [S, 1, D] hidden states to [R, T] tensors."""

    def __call__(
        self, model: PolicyModel, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Zero wherever nothing was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead:
    """Log-prob and entropy of each selected token. num_positions: T."""

    temperature: float
    shard: VocabShard
    num_positions: int

    def __call__(
        self, model: PolicyModel, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, T] float32 log-probs and entropies (nats)."""
        hidden_ND = hidden_S1D.squeeze(1).index_select(0, micro.predict_N)
        logp_N, entropy_N = logp_and_entropy(
            hidden_ND, model.output_weight(), micro.target_N, self.temperature, self.shard
        )
        width = self.num_positions
        return micro.to_rows(logp_N, width), micro.to_rows(entropy_N, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarHead:
    """One number for each selected token, read where the token is predicted. num_positions: T.

    Every tensor rank holds the whole weight and sees all tokens, so each computes the whole
    value and the whole gradient of weight and hidden states: nothing is summed over tensor
    ranks, neither here nor after.
    """

    num_positions: int

    def __call__(
        self, model: PolicyModel, micro: MicroBatch, hidden_S1D: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """[R, T] float32 values."""
        hidden_ND = hidden_S1D.squeeze(1).index_select(0, micro.predict_N)
        value_N = hidden_ND.float() @ model.output_weight().float().squeeze(0)
        return (micro.to_rows(value_N, self.num_positions),)
