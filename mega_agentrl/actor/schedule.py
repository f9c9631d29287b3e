"""Forward and backward passes of a list of micro-batches, through Megatron's schedules.

Megatron decides who runs what when (1F1B between pipeline stages, interleaved with virtual
stages, a plain loop without them), accumulates gradients over the micro-batches and sums them
over data ranks, tied embeddings and replicated norms after the last one. The head runs on the
last stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mega_agentrl.estimate.measured import PROCESS
from mega_agentrl.types.doing import WAIT_S, doing

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.actor.heads import Head
    from mega_agentrl.actor.packing import MicroBatch

Share = dict[str, torch.Tensor]
"""0-d shares of a micro-batch: `loss`, which adds up to the step's loss, `num_tokens`, and
metrics summed over tokens, to be divided by the global number of tokens."""

Objective = Callable[..., tuple[torch.Tensor, Share]]
"""Maps a micro-batch and its head's [R, T] tensors to loss and shares."""


_TRIM_EVERY_TOKENS = 4096
"""On a CPU, between two `HostMemory.trim`: before every large micro-batch, and not before each
small one, which it would slow down by a quarter."""


class NamedCommunicator(P2PCommunicator):
    """Megatron's way between pipeline stages, which says whom it waits for (`types.doing`)."""

    def _communicate(self, **how: Any) -> Any:
        ways = {
            f"rank {self.prev_rank}": (how["recv_prev"], how["tensor_send_prev"] is not None),
            f"rank {self.next_rank}": (how["recv_next"], how["tensor_send_next"] is not None),
        }
        peers = [peer for peer, used in ways.items() if any(used)]
        receives = any(way[0] for way in ways.values())
        sends = any(way[1] for way in ways.values())
        verb = "/".join(["send"] * sends + ["receive"] * receives)
        with doing(f"micro-batch {verb}", " and ".join(peers), bound_s=WAIT_S):
            return super()._communicate(**how)


class Schedule:
    """Runs micro-batches on this rank's chunks."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], groups: Groups) -> None:
        self._chunks = list(chunks)
        self._groups = groups
        self._tokens_to_trim = 0
        self._peers = groups.peers("tensor", "context", "expert", "pipeline")
        # Tied embeddings and replicated norms are summed within pipeline and tensor group.
        finalize = partial(_finalize, peers=groups.peers("data", "tensor", "pipeline"))
        no_syncs = [chunk.no_sync for chunk in self._chunks]
        # Megatron's schedules read these from whichever chunk they look at first.
        for chunk in self._chunks:
            config = chunk.module.config
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
            config.finalize_model_grads_func = finalize
            # Between two stages with several chunks each, both directions run between the same
            # two ranks. In one batch an activation would be taken for a gradient; apart, each
            # direction has a channel of its own.
            config.overlap_p2p_comm = len(no_syncs) > 1
            config.batch_p2p_comm = not config.overlap_p2p_comm
        self._communicator = NamedCommunicator(groups.collection.pp, self._chunks[0].module.config)

    def train(self, micros: Sequence[MicroBatch], head: Head, objective: Objective) -> list[Share]:
        """Gradients into the buffers; the shares of each micro-batch on the last stage, else [].

        Waits for: the other stages, tensor and data ranks. Unblocked by: them, or the
        groups' deadline.
        """
        return self._run(micros, partial(_loss, head=head, objective=objective))

    @torch.no_grad()
    def score(self, micros: Sequence[MicroBatch], head: Head) -> list[tuple[torch.Tensor, ...]]:
        """The head's [R, T] tensors of each micro-batch on the last stage, else []."""
        return self._run(micros, partial(_score, head=head), forward_only=True)

    def _run(
        self, micros: Sequence[MicroBatch], finish: Any, *, forward_only: bool = False
    ) -> list[Any]:
        pipeline = self._groups.position.place.pipeline_size
        virtual = len(self._chunks)

        def forward_step(
            iterator: Iterator[MicroBatch], model: DistributedDataParallel
        ) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            self._trim(len(micro.token_S))
            return model.module.run(micro), partial(finish, model.module, micro)

        extra = {"p2p_communicator": self._communicator} if pipeline > 1 else {}
        run = get_forward_backward_func(pp_size=pipeline, vp_size=virtual if virtual > 1 else None)
        # Without their number: what is told of an operation once counts for all of its name.
        with doing("passes of micro-batches", self._peers):
            return run(
                forward_step_func=forward_step,
                data_iterator=[iter(micros) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(micros),
                # Stages tell each other the true length of every packed micro-batch.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self._groups.collection,
                **extra,
            )

    def _trim(self, num_tokens: int) -> None:
        self._tokens_to_trim -= num_tokens
        if self._tokens_to_trim < 0:
            PROCESS.trim()
            self._tokens_to_trim = _TRIM_EVERY_TOKENS


def _finalize(model: list[Any], num_tokens: torch.Tensor, *, peers: str, **rest: Any) -> None:
    # The loss is already divided by the global count, so Megatron's own division is left out.
    with doing("gradient reduction", peers):
        finalize_model_grads(model, None, **rest)


def _loss(
    model: Any, micro: MicroBatch, hidden_S1D: torch.Tensor, *, head: Head, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, Share]:
    loss, share = objective(micro, *head(model, micro, hidden_S1D))
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), share


def _score(
    model: Any,
    micro: MicroBatch,
    hidden_S1D: torch.Tensor,
    *,
    head: Head,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, ...]:
    return head(model, micro, hidden_S1D)
