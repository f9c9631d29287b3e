"""Forward and backward passes of a list of micro-batches, with Megatron's pipeline schedules.

Megatron schedules the passes (1F1B over pipeline stages, interleaved 1F1B with virtual stages,
a plain loop without stages), accumulates the gradients of the micro-batches, and after the last
one sums them over data ranks, tied embeddings and replicated norms. The output head runs on the
last stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from mega_agentrl.actor.megatron_compat import TrackedP2PCommunicator
from mega_agentrl.estimate.host_memory import PROCESS_MEMORY
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.model.heads import OutputHead
    from mega_agentrl.actor.parallel.process_groups import ParallelGroups
    from mega_agentrl.actor.training.packing import MicroBatch

MicroBatchStats = dict[str, torch.Tensor]
"""0-d results of a micro-batch, to be summed over all micro-batches of a step: `loss`,
`num_tokens`, and metrics summed over tokens."""

Objective = Callable[..., tuple[torch.Tensor, MicroBatchStats]]
"""Maps a micro-batch and its head's `[R, T]` tensors to the loss and the micro-batch's stats."""

_TRIM_EVERY_TOKENS = 4096
"""Tokens between two calls of `HostMemoryTracker.trim` on a CPU. Trimming before every small
micro-batch would slow it down by a quarter."""


class PipelineSchedule:
    """Runs micro-batches on this rank's model chunks."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups) -> None:
        self._chunks = list(chunks)
        self._groups = groups
        self._tokens_until_trim = 0
        self._peer_description = groups.describe_peers("tensor", "context", "expert", "pipeline")
        # Tied embeddings and replicated norms are summed over the pipeline and tensor groups.
        finalize = partial(
            _finalize_grads, peers=groups.describe_peers("data", "tensor", "pipeline")
        )
        no_syncs = [chunk.no_sync for chunk in self._chunks]
        # Megatron's schedules read these options from the config of any chunk.
        for chunk in self._chunks:
            config = chunk.module.config
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
            config.finalize_model_grads_func = finalize
            # With several chunks per stage, activations and gradients travel between the same
            # two ranks. Batched, one could be received as the other; unbatched, each direction
            # has its own channel.
            config.overlap_p2p_comm = len(no_syncs) > 1
            config.batch_p2p_comm = not config.overlap_p2p_comm
        self._communicator = TrackedP2PCommunicator(
            groups.pg_collection.pp, self._chunks[0].module.config
        )

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        head: OutputHead,
        objective: Objective,
        outputs: list[tuple[torch.Tensor, ...]] | None = None,
    ) -> list[MicroBatchStats]:
        """Accumulate gradients in the buffers of the chunks and reduce them.

        Waits for the other pipeline stages, tensor and data ranks, at most for the timeout of
        the groups.

        Args:
            micros: The micro-batches.
            head: Maps hidden states to the inputs of the objective.
            objective: Loss and metrics of a micro-batch.
            outputs: Gets the head's `[R, T]` tensors of each micro-batch on the last stage.

        Returns:
            The stats of each micro-batch on the last stage, an empty list on other stages.
        """
        return self._run_schedule(
            micros, partial(_loss_func, head=head, objective=objective, outputs=outputs)
        )

    @torch.no_grad()
    def forward_only(
        self, micros: Sequence[MicroBatch], head: OutputHead
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return the head's `[R, T]` tensors of each micro-batch on the last stage, else []."""
        return self._run_schedule(micros, partial(_forward_only_func, head=head), forward_only=True)

    def _run_schedule(
        self, micros: Sequence[MicroBatch], output_func: Any, *, forward_only: bool = False
    ) -> list[Any]:
        pipeline_size = self._groups.coordinates.model_parallel_rank.pipeline_size
        virtual_size = len(self._chunks)

        def forward_step(
            iterator: Iterator[MicroBatch], model: DistributedDataParallel
        ) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            self._trim_host_memory(len(micro.token_S))
            return model.module.forward_packed(micro), partial(output_func, model.module, micro)

        communicator = {"p2p_communicator": self._communicator} if pipeline_size > 1 else {}
        run = get_forward_backward_func(
            pp_size=pipeline_size, vp_size=virtual_size if virtual_size > 1 else None
        )
        # The name has no micro-batch count, so that equal operations are tracked as one.
        with track_activity("passes of micro-batches", self._peer_description):
            return run(
                forward_step_func=forward_step,
                data_iterator=[iter(micros) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(micros),
                # Stages send each other the actual length of every packed micro-batch.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self._groups.pg_collection,
                **communicator,
            )

    def _trim_host_memory(self, num_tokens: int) -> None:
        self._tokens_until_trim -= num_tokens
        if self._tokens_until_trim < 0:
            PROCESS_MEMORY.trim()
            self._tokens_until_trim = _TRIM_EVERY_TOKENS


def _finalize_grads(
    model: list[Any], num_tokens: torch.Tensor, *, peers: str, **options: Any
) -> None:
    # Megatron gets no num_tokens, because the loss is already divided by the global count.
    with track_activity("gradient reduction", peers):
        finalize_model_grads(model, None, **options)


def _loss_func(
    model: Any,
    micro: MicroBatch,
    hidden_S1D: torch.Tensor,
    *,
    head: OutputHead,
    objective: Objective,
    outputs: list[tuple[torch.Tensor, ...]] | None,
) -> tuple[torch.Tensor, torch.Tensor, MicroBatchStats]:
    values = head(model, micro, hidden_S1D)
    if outputs is not None:
        outputs.append(tuple(value.detach() for value in values))
    loss, stats = objective(micro, *values)
    # The second value, Megatron's number of tokens, is not used: see `_finalize_grads`.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), stats


def _forward_only_func(
    model: Any,
    micro: MicroBatch,
    hidden_S1D: torch.Tensor,
    *,
    head: OutputHead,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, ...]:
    return head(model, micro, hidden_S1D)
