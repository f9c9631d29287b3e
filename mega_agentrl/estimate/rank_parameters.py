"""Which parameters a policy rank holds, from the configuration and the model's shape alone.

Ranks of one pipeline stage hold equally many, whatever their tensor or expert rank, so one rank
stands for its stage. Names and shapes are those of the actors' own mapping (`reshard.names`);
here they are only counted.

Knows neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.names import EMBEDDING, hf_shapes, is_expert, megatron_layout
from mega_agentrl.reshard.place import Place

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import ParallelConfig
    from mega_agentrl.reshard.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """chunk: number of the rank's run of layers. expert: belongs to one expert. shared: one of
    two copies of a tied embedding, on the first or the last stage.
    """

    chunk: int
    numel: int
    expert: bool
    shared: bool


def num_parameters(shape: ModelShape) -> int:
    """Of the checkpoint; a tied output layer counts once."""
    return sum(map(prod, hf_shapes(shape).values()))


def num_active_parameters(shape: ModelShape) -> int:
    """Of the checkpoint without the experts that a token does not go through."""
    if shape.moe is None:
        return num_parameters(shape)
    idle = shape.moe.num_experts - shape.moe.top_k
    expert = 3 * shape.hidden * shape.moe.ffn
    return num_parameters(shape) - sum(shape.moe.sparse) * idle * expert


def rank_parameters(shape: ModelShape, layout: ParallelConfig, stage: int) -> tuple[Parameter, ...]:
    """All parameters of a rank of a pipeline stage, in the order of the actor's model.

    Raises `ValueError` where the cut does not divide the model.
    """
    place = Place(
        tensor_size=layout.tensor,
        pipeline_rank=stage,
        pipeline_size=layout.pipeline,
        virtual_size=layout.virtual,
        expert_size=layout.expert,
        expert_tensor_size=layout.expert_tensor_size,
    )
    return _at(shape, place)


@lru_cache(maxsize=64)
def _at(shape: ModelShape, place: Place) -> tuple[Parameter, ...]:
    twice = shape.tied and place.pipeline_size > 1
    return tuple(
        Parameter(
            chunk=_chunk_of(shard.name, place),
            numel=prod(shard.shape),
            expert=is_expert(shard.name),
            shared=twice and any(block.hf_name == EMBEDDING for block in shard.blocks),
        )
        for shard in megatron_layout(shape, place)
    )


def _chunk_of(name: str, place: Place) -> int:
    numbers = range(place.virtual_size)
    return next(number for number in numbers if name.startswith(place.prefix(number)))
