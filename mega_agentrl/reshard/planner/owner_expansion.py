"""Rectangle owners of a large model, expanded from one layer of each type.

Layers of one type (dense or MoE) are sharded alike; only their names and the pipeline stage differ.
One layer of each type therefore stands for all, and tables for thousands of ranks need no layout
per rank and layer:

    trainer   the tensor, expert and data ranks of one stage, repeated for every stage; layers are
              assigned to the stages in order, as evenly as possible
    rollout   the tensor ranks of one engine, repeated for every engine

Only estimates and simulations use this; in a run each rank describes its own shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import split_layers
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_mapping import (
    HF_LM_HEAD,
    hf_embedding,
    hf_final_norm,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.regions import rect_owners

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.mapping.model_shape import ModelShape
    from mega_agentrl.reshard.planner.regions import Ranks, RankSetCache, RectOwners

_LAYER_NAME = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParallelSizes:
    """Parallel sizes of a trainer.

    Ranks are ordered by tensor, then data, then pipeline rank. Experts are distributed over the
    tensor and data ranks of a stage.
    """

    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1
    expert_size: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_stage % self.expert_size:
            expected = f"a divisor of tensor * data = {self.ranks_per_stage}"
            raise InputError("expert", self.expert_size, expected, "one was changed alone")

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that hold the same layers."""
        return self.tensor_size * self.data_size

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks."""
        return self.ranks_per_stage * self.pipeline_size


def first_layer_of_each_type(shape: ModelShape) -> list[int]:
    """Return the index of the first layer of each type, dense before MoE."""
    layers = range(shape.num_layers)
    firsts = (next((n for n in layers if shape.is_moe_layer(n) is s), None) for s in (False, True))
    return [layer for layer in firsts if layer is not None]


def one_layer_per_type(shape: ModelShape) -> ModelShape:
    """Return the shape of a model with one layer of each type."""
    layers = first_layer_of_each_type(shape)
    moe = shape.moe
    if moe:
        moe = replace(
            moe, moe_layer_pattern=tuple(moe.moe_layer_pattern[layer] for layer in layers)
        )
    return replace(shape, num_layers=len(layers), moe=moe)


def expand_trainer_owners(
    shape: ModelShape, sizes: TrainerParallelSizes, rank_sets: RankSetCache
) -> RectOwners:
    """Return the rectangles that the trainer ranks hold, with ranks numbered from 0."""
    sample = one_layer_per_type(shape)
    layouts = [
        megatron_layout(
            sample,
            ModelParallelRank(
                tensor_rank=rank % sizes.tensor_size,
                tensor_size=sizes.tensor_size,
                expert_rank=rank % sizes.expert_size,
                expert_size=sizes.expert_size,
            ),
        )
        for rank in range(sizes.ranks_per_stage)
    ]
    owners = rect_owners(layouts, rank_sets)
    last = sizes.pipeline_size - 1
    shifters = [
        _rank_shifter(stage * sizes.ranks_per_stage) for stage in range(sizes.pipeline_size)
    ]
    stage_of = _stages_of_layers(shape.num_layers, sizes.pipeline_size)
    result: RectOwners = {}
    for layer, name, sample_name in _layer_tensor_names(shape, owners):
        shift_ranks = shifters[stage_of[layer]]
        result[name] = {rect: shift_ranks(ranks) for rect, ranks in owners[sample_name].items()}
    for name in filter(_is_outside_layers, owners):
        stages = [last] if name in (hf_final_norm(shape), HF_LM_HEAD) else [0]
        if name == hf_embedding(shape) and shape.tie_word_embeddings and last:
            stages = [0, last]
        result[name] = {
            rect: rank_sets.union(tuple(shifters[stage](ranks) for stage in stages))
            for rect, ranks in owners[name].items()
        }
    return result


def expand_rollout_owners(
    shape: ModelShape,
    engine: Sequence[Sequence[ShardLayout]],
    num_engines: int,
    rank_sets: RankSetCache,
    *,
    first_rank: int,
) -> RectOwners:
    """Return the rectangles that the rollout ranks need, with ranks numbered from `first_rank`.

    `engine` has the layouts of the `one_layer_per_type` model by tensor rank of an engine.
    """
    owners = rect_owners([*engine] * num_engines, rank_sets, first_rank=first_rank)
    result = {name: owners[name] for name in filter(_is_outside_layers, owners)}
    for _, name, sample_name in _layer_tensor_names(shape, owners):
        result[name] = owners[sample_name]
    return result


def _stages_of_layers(num_layers: int, num_stages: int) -> list[int]:
    """Return the stage of each layer, for any number of stages."""
    if stages := split_layers(num_layers, num_stages):
        return [stage for stage, layers in enumerate(stages) for _ in layers]
    return [layer * num_stages // num_layers for layer in range(num_layers)]


def _is_outside_layers(name: str) -> bool:
    """Return whether a tensor belongs to no layer of the decoder."""
    return _LAYER_NAME.match(name) is None


def _layer_tensor_names(shape: ModelShape, owners: RectOwners) -> list[tuple[int, str, str]]:
    """Return layer, name in the model and name in the sample for every tensor of every layer."""
    names_of: dict[int, list[tuple[str, str]]] = {}
    for sample_name in owners:
        if match := _LAYER_NAME.match(sample_name):
            suffix = sample_name[match.end() :]
            names_of.setdefault(int(match[1]), []).append((sample_name, suffix))
    sample_layers = enumerate(first_layer_of_each_type(shape))
    sample_of = {shape.is_moe_layer(layer): index for index, layer in sample_layers}
    return [
        (layer, f"{shape.family.hf_decoder_prefix}layers.{layer}.{suffix}", sample_name)
        for layer in range(shape.num_layers)
        for sample_name, suffix in names_of[sample_of[shape.is_moe_layer(layer)]]
    ]


def _rank_shifter(shift: int) -> Callable[[Ranks], Ranks]:
    """Return a function that adds `shift` to rank tuples; equal tuples share one result."""
    cache: dict[Ranks, Ranks] = {}

    def shift_ranks(ranks: Ranks) -> Ranks:
        shifted = cache.get(ranks)
        if shifted is None:
            shifted = cache[ranks] = tuple(rank + shift for rank in ranks)
        return shifted

    return shift_ranks
