"""Lists the parameters of a policy rank from the configuration and the model shape.

Ranks of one pipeline stage hold equally many parameters whatever their tensor or expert rank, so
one rank represents its stage. Names and shapes come from the actors' mapping (`reshard.mapping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.mapping.model_mapping import (
    HF_EMBEDDING,
    hf_shapes,
    is_expert_param,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank

if TYPE_CHECKING:
    from mega_agentrl.config.sections.policy import ParallelConfig
    from mega_agentrl.reshard.mapping.model_shape import ModelShape


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
    """Whether it is one of the two copies of a tied embedding, on the first or last stage."""


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
        ValueError: the parallel sizes do not divide the model.
    """
    rank = ModelParallelRank(
        tensor_size=layout.tensor,
        pipeline_rank=stage,
        pipeline_size=layout.pipeline,
        virtual_size=layout.virtual_pipeline,
        expert_size=layout.expert,
        expert_tensor_size=layout.expert_tensor_size,
    )
    return _parameters_at(shape, rank)


@lru_cache(maxsize=64)
def _parameters_at(shape: ModelShape, rank: ModelParallelRank) -> tuple[RankParameter, ...]:
    has_two_embeddings = shape.tie_word_embeddings and rank.pipeline_size > 1
    return tuple(
        RankParameter(
            chunk=_model_chunk(shard.name, rank),
            numel=prod(shard.shape),
            is_expert=is_expert_param(shard.name),
            is_shared_embedding=has_two_embeddings
            and any(block.hf_name == HF_EMBEDDING for block in shard.blocks),
        )
        for shard in megatron_layout(shape, rank)
    )


def _model_chunk(name: str, rank: ModelParallelRank) -> int:
    numbers = range(rank.virtual_size)
    return next(number for number in numbers if name.startswith(rank.param_prefix(number)))
