"""Forward and backward passes of a list of micro-batches, through Megatron's schedules.

Megatron decides who runs what when (1F1B between pipeline stages, a plain loop without
them), accumulates gradients over the micro-batches and sums them over data ranks, tied
embeddings and replicated norms after the last one. The head runs on the last stage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mega_agentrl.actor.vocab_parallel import VocabShard, logp_and_entropy

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.actor.loss import Objective, Share
    from mega_agentrl.actor.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What turns hidden states into log-probs: temperature, vocabulary shard, [B, T] width T."""

    temperature: float
    shard: VocabShard
    num_positions: int


class Schedule:
    """Runs micro-batches on this rank's stage."""

    def __init__(self, model: DistributedDataParallel, groups: Groups) -> None:
        self._model = model
        self._groups = groups
        config = model.module.config
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = _finalize
        self._communicator = P2PCommunicator(groups.collection.pp, config)

    def train(self, micros: Sequence[MicroBatch], head: Head, objective: Objective) -> list[Share]:
        """Gradients into the buffers; the shares of each micro-batch on the last stage, else [].

        Waits for: the other stages, tensor and data ranks. Unblocked by: them, or the
        groups' deadline.
        """
        return self._run(micros, partial(_loss, head=head, objective=objective))

    @torch.no_grad()
    def score(
        self, micros: Sequence[MicroBatch], head: Head
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[R, T] log-prob and entropy of each micro-batch on the last stage, else []."""
        return self._run(micros, partial(_score, head=head), forward_only=True)

    def _run(
        self, micros: Sequence[MicroBatch], finish: Any, *, forward_only: bool = False
    ) -> list[Any]:
        pipeline = self._groups.position.pipeline_size

        def forward_step(
            iterator: Iterator[MicroBatch], model: DistributedDataParallel
        ) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            return model.module.run(micro), partial(finish, model.module, micro)

        extra = {"p2p_communicator": self._communicator} if pipeline > 1 else {}
        return get_forward_backward_func(pp_size=pipeline)(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self._model],
            num_microbatches=len(micros),
            # Stages tell each other the true length of every packed micro-batch.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self._groups.collection,
            **extra,
        )


def _finalize(model: list[Any], num_tokens: torch.Tensor, **rest: Any) -> None:
    # The loss is already divided by the global count, so Megatron's own division is left out.
    finalize_model_grads(model, None, **rest)


def _head(
    model: Any, micro: MicroBatch, hidden_S1D: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_ND = hidden_S1D.squeeze(1).index_select(0, micro.predict_N)
    logp_N, entropy_N = logp_and_entropy(
        hidden_ND, model.output_weight(), micro.target_N, head.temperature, head.shard
    )
    width = head.num_positions
    return micro.to_rows(logp_N, width), micro.to_rows(entropy_N, width)


def _loss(
    model: Any, micro: MicroBatch, hidden_S1D: torch.Tensor, *, head: Head, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, Share]:
    loss, share = objective(micro, *_head(model, micro, hidden_S1D, head))
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), share


def _score(
    model: Any,
    micro: MicroBatch,
    hidden_S1D: torch.Tensor,
    *,
    head: Head,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _head(model, micro, hidden_S1D, head)
