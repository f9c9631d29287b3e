"""Computes the parameters, weights, gradients and optimizer state of a policy rank, in bytes.

    weights    training dtype; in padded flat buffers with the distributed optimizer
    gradients  float32, in flat buffers, on every replica
    optimizer  two float32 moments, and float32 master weights unless the weights are float32, for
               the elements that the replica updates

The replicas of a parameter are the ranks that hold the same shard of it. All ranks of a pipeline
stage hold the same number of parameters, so one rank represents its stage; its optimizer state is
that of the replica that updates the most elements. The reference policy of a KL term is a copy of
the weights in pinned host memory, whose blocks are rounded up to powers of two bytes.

Each model chunk of a rank has one of Megatron's flat buffers for dense parameters and one for
expert parameters, both in reverse parameter order. With the distributed optimizer weights and
gradients are in such buffers: every parameter starts at a multiple of 64 elements; every bucket
ends at a multiple of lcm(replicas, 128); a shared embedding has its own bucket; replica r of n
updates the r-th of n equal parts of each bucket. Without the distributed optimizer there is no
padding, weights are separate tensors, and every replica updates all parameters. A frozen vision
tower is in no buffer, and neither are weights whose adapters are trained in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import lcm, prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import round_up
from mega_agentrl.reshard.mapping.lora_layout import lora_shards
from mega_agentrl.reshard.mapping.model_mapping import (
    hf_embedding,
    hf_shapes,
    is_expert_param,
    is_vision_param,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.partition import ModelParallelRank

if TYPE_CHECKING:
    from mega_agentrl.config.sections.policy import LoraConfig, ParallelConfig
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_FLOAT32_BYTES = 4
_PINNED_BLOCK_BYTES = 2**28
"""Bytes of the largest block of pinned host memory."""
_PARAMETER_MULTIPLE = 64
"""Elements of which the start of a parameter in a flat buffer is a multiple."""
_BUCKET_MULTIPLE = 128
"""Elements of which the end of a bucket is a multiple."""


@dataclass(frozen=True, slots=True)
class RankParameter:
    """One parameter of a rank."""

    chunk: int
    """Index of the model chunk (virtual pipeline stage)."""
    numel: int
    """Number of elements on this rank."""
    is_expert: bool
    """Whether the parameter belongs to an expert."""
    is_shared_embedding: bool
    """Whether the parameter is one of the two copies of a tied embedding, which are on the first
    and on the last pipeline stage."""
    is_vision: bool = False
    """Whether the parameter belongs to the vision tower."""


def num_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the checkpoint; a tied output layer counts once."""
    return sum(map(prod, hf_shapes(shape).values()))


def num_active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that one token activates."""
    if shape.moe is None:
        return num_parameters(shape)
    num_inactive = shape.moe.num_experts - shape.moe.top_k
    expert_numel = 3 * shape.hidden_size * shape.moe.ffn_hidden_size
    return num_parameters(shape) - sum(shape.moe.moe_layer_pattern) * num_inactive * expert_numel


def rank_parameters(
    shape: ModelShape, layout: ParallelConfig, stage: int
) -> tuple[RankParameter, ...]:
    """Return all parameters of a rank of a pipeline stage, in the order of the actor's model.

    Raises:
        ValueError: The parallel sizes do not divide the model.
    """
    return _parameters_at(shape, _stage_rank(layout, stage))


def _stage_rank(layout: ParallelConfig, stage: int) -> ModelParallelRank:
    return ModelParallelRank(
        tensor_size=layout.tensor,
        pipeline_rank=stage,
        pipeline_size=layout.pipeline,
        virtual_size=layout.virtual_pipeline,
        expert_size=layout.expert,
        expert_tensor_size=layout.expert_tensor_size,
    )


def _adapters_at(
    shape: ModelShape, rank: ModelParallelRank, lora: LoraConfig
) -> tuple[list[RankParameter], int]:
    """Return the parameters of a rank's adapters, and the elements of the weights that have any."""
    parameters, num_adapted = [], 0
    for shard in megatron_layout(shape, rank):
        adapters = lora_shards([shard], lora.rank, lora.targets)
        num_adapted += prod(shard.shape) if adapters else 0
        parameters += [
            RankParameter(
                chunk=_model_chunk(adapter.name, rank),
                numel=prod(adapter.shape),
                is_expert=is_expert_param(adapter.name),
                is_shared_embedding=False,
            )
            for adapter in adapters
        ]
    return parameters, num_adapted


@lru_cache(maxsize=64)
def _parameters_at(shape: ModelShape, rank: ModelParallelRank) -> tuple[RankParameter, ...]:
    has_two_embeddings = shape.tie_word_embeddings and rank.pipeline_size > 1
    return tuple(
        RankParameter(
            chunk=_model_chunk(shard.name, rank),
            numel=prod(shard.shape),
            is_expert=is_expert_param(shard.name),
            is_shared_embedding=has_two_embeddings
            and any(block.hf_name == hf_embedding(shape) for block in shard.blocks),
            is_vision=is_vision_param(shard.name),
        )
        for shard in megatron_layout(shape, rank)
    )


def _model_chunk(name: str, rank: ModelParallelRank) -> int:
    numbers = range(rank.virtual_size)
    return next(number for number in numbers if name.startswith(rank.param_prefix(number)))


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One of Megatron's flat buffers on a rank."""

    is_expert: bool
    """Whether the buffer holds expert parameters."""
    numel: int
    """Number of elements, padding included."""
    owned_by_replica: tuple[int, ...]
    """Number of parameter elements that each replica updates, without padding."""


def flat_buffers(parameters: Sequence[RankParameter], layout: ParallelConfig) -> list[FlatBuffer]:
    """Return the non-empty flat buffers of one rank: by chunk, dense before experts."""
    buffers = []
    for _, group in groupby(parameters, key=lambda parameter: parameter.chunk):
        chunk = list(group)
        for expert in (False, True):
            num_replicas = _num_replicas(layout, expert=expert)
            members = [parameter for parameter in chunk if parameter.is_expert is expert]
            if members:
                numel, owned_by_replica = _buffer_layout(
                    members, num_replicas, padded=layout.distributed_optimizer
                )
                buffers.append(FlatBuffer(expert, numel, owned_by_replica))
    return buffers


def _buffer_layout(
    parameters: Sequence[RankParameter], num_replicas: int, *, padded: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the number of elements of the buffer and the number that each replica updates.

    Args:
        parameters: The parameters of the buffer, in the order of the model.
        num_replicas: Number of ranks with the same parameters.
        padded: Whether the buffer is padded and divided for the distributed optimizer.
    """
    if not padded:
        numel = sum(parameter.numel for parameter in parameters)
        return numel, (numel,) * num_replicas
    multiple = lcm(num_replicas, _BUCKET_MULTIPLE)
    owned_by_replica = [0] * num_replicas
    numel = 0
    for bucket in _buckets(parameters):
        spans, stop = [], 0
        for parameter in bucket:
            start = round_up(stop, _PARAMETER_MULTIPLE)
            stop = start + parameter.numel
            spans.append((start, stop))
        size = round_up(stop, multiple)
        for replica, count in _replica_shares(spans, size // num_replicas):
            owned_by_replica[replica] += count
        numel += size
    return numel, tuple(owned_by_replica)


def _buckets(parameters: Sequence[RankParameter]) -> Iterator[list[RankParameter]]:
    """Yield the parameters of each bucket in reverse order; a shared embedding is separate."""
    for _, bucket in groupby(
        reversed(parameters), key=lambda parameter: parameter.is_shared_embedding
    ):
        yield list(bucket)


def _replica_shares(spans: Sequence[tuple[int, int]], share: int) -> Iterator[tuple[int, int]]:
    """Yield (replica, number of elements) for each part of a span that one replica updates.

    Args:
        spans: Start and stop of each parameter in the bucket.
        share: Number of elements of the bucket per replica.
    """
    for start, stop in spans:
        while start < stop:
            replica = start // share
            share_stop = min(stop, (replica + 1) * share)
            yield replica, share_stop - start
            start = share_stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The model state on one rank of a pipeline stage."""

    num_parameters: int
    """Number of parameter elements, without padding."""
    largest_parameter: int
    """Bytes of the largest parameter in the training dtype, which a temporary copy of its gradient
    takes in the backward pass."""
    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients."""
    optimizer: int
    """Bytes of the optimizer state."""
    reference_weights: int
    """Bytes of the weights that differ from the reference's: all, or those of the adapters."""
    merged_weights: int
    """Bytes of the weights with adapters, which a weight transfer merges into copies."""

    checkpoint: int
    """Bytes that the rank writes to a checkpoint, which it copies to host memory before."""

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of pinned host memory for the reference."""
        return pinned_bytes(self.reference_weights)


def pinned_bytes(num_bytes: int) -> int:
    """Return the pinned host memory for a copy of `num_bytes`, whose blocks are rounded up."""
    num_blocks, rest_bytes = divmod(num_bytes, _PINNED_BLOCK_BYTES)
    return num_blocks * _PINNED_BLOCK_BYTES + (
        1 << (rest_bytes - 1).bit_length() if rest_bytes else 0
    )


def estimate_model_state(
    shape: ModelShape,
    layout: ParallelConfig,
    stage: int,
    *,
    item_bytes: int = 2,
    freeze_vision: bool = False,
    lora: LoraConfig | None = None,
    replica: int | None = None,
    expert_replica: int | None = None,
) -> ModelState:
    """Return the state of a rank after its first optimizer step.

    Args:
        shape: The model.
        layout: The parallel sizes.
        stage: The pipeline stage.
        item_bytes: Bytes of a weight in training, 2 or 4.
        freeze_vision: Whether the vision tower has weights only, outside the flat buffers.
        lora: The adapters that are trained in place of the weights; rank 0 or None for none.
        replica: Index among the ranks with the same dense weights; None for the largest state.
        expert_replica: Index among the ranks with the same experts; None for the largest state.

    Raises:
        ValueError: The parallel sizes do not divide the model.
    """
    parameters = rank_parameters(shape, layout, stage)
    adapters: list[RankParameter] = []
    num_adapted = 0
    if lora is not None and lora.rank:
        adapters, num_adapted = _adapters_at(shape, _stage_rank(layout, stage), lora)
    frozen: list[RankParameter] = []
    trained = list(adapters)
    for parameter in parameters:
        is_frozen = bool(adapters) or (freeze_vision and parameter.is_vision)
        (frozen if is_frozen else trained).append(parameter)
    buffers = flat_buffers(trained, layout)
    numel = sum(buffer.numel for buffer in buffers)
    num_updated = sum(
        _num_updated_elements(buffers, expert=expert, replica=index)
        for expert, index in ((False, replica), (True, expert_replica))
    )
    num_copies = 2 if item_bytes == _FLOAT32_BYTES else 3
    optimizer = num_updated * num_copies * _FLOAT32_BYTES
    checkpoint = _num_written_elements(adapters or parameters, layout) * item_bytes
    if layout.distributed_optimizer:
        checkpoint += optimizer
    else:
        checkpoint += _num_written_elements(trained, layout) * num_copies * _FLOAT32_BYTES
    largest = max(parameter.numel for parameter in trained)
    return ModelState(
        num_parameters=sum(parameter.numel for parameter in (*parameters, *adapters)),
        largest_parameter=largest * item_bytes,
        weights=(numel + sum(parameter.numel for parameter in frozen)) * item_bytes,
        gradients=numel * _FLOAT32_BYTES,
        optimizer=optimizer,
        reference_weights=(numel + (0 if adapters else sum(p.numel for p in frozen))) * item_bytes,
        merged_weights=num_adapted * item_bytes,
        checkpoint=checkpoint,
    )


def _num_written_elements(parameters: Sequence[RankParameter], layout: ParallelConfig) -> int:
    """Return the most elements that a rank writes of parameters, one replica of which is written.

    Each parameter is written by the replica with the least so far, whose share is then at most the
    mean and most of a parameter. Replicas among the tensor ranks, which are small, count in full,
    and so does the second copy of a tied embedding.
    """
    num_written = 0
    for expert in (False, True):
        numels = [parameter.numel for parameter in parameters if parameter.is_expert is expert]
        num_replicas = _num_replicas(layout, expert=expert)
        if numels:
            num_written += (sum(numels) + (num_replicas - 1) * max(numels)) // num_replicas
    return num_written


def _num_replicas(layout: ParallelConfig, *, expert: bool) -> int:
    """Return the number of ranks with the same dense or expert weights."""
    if not expert:
        return layout.data * layout.context
    num_stage_ranks = layout.tensor * layout.context * layout.data
    return num_stage_ranks // (layout.expert * layout.expert_tensor_size)


def _num_updated_elements(
    buffers: Sequence[FlatBuffer], *, expert: bool, replica: int | None
) -> int:
    """Return the number of dense or expert elements that a replica updates.

    Args:
        buffers: All buffers of the rank.
        expert: Whether to count expert elements instead of dense ones.
        replica: Index of the replica; None for the replica that updates the most elements.
    """
    by_buffer = [buffer.owned_by_replica for buffer in buffers if buffer.is_expert is expert]
    by_replica: list[int] = [sum(shares) for shares in zip(*by_buffer, strict=True)]
    if not by_replica:
        return 0
    return max(by_replica) if replica is None else by_replica[replica]
