"""Who owns what in a large model, from one layer of each kind.

Layers of a kind (dense, with experts) are cut alike; only their names and the pipeline stage
differ. So a model with one layer of each kind stands for all, and tables for thousands of ranks
are made without a layout per rank and layer:

    sources   one stage's ranks (tensor, expert and data ranks), repeated for every stage;
              layers are dealt to the stages in order, as evenly as they go
    sinks     the tensor ranks of one engine, repeated for every engine

For simulation; real ranks describe their own shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_agentrl.reshard.names import EMBEDDING, FINAL_NORM, LM_HEAD, megatron_layout
from mega_agentrl.reshard.place import Place
from mega_agentrl.reshard.regions import owned

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.regions import Owned, Ranks, RankSets

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCut:
    """Sizes of a trainer's cut. Ranks: tensor first, then data, then pipeline; experts over
    the tensor and data ranks of a stage.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.ranks_of_stage % self.expert:
            raise ValueError(
                f"expert={self.expert}: expected a divisor of tensor * data = "
                f"{self.ranks_of_stage}; probable cause: one of them was changed alone"
            )

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that hold the same layers."""
        return self.tensor * self.data

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.ranks_of_stage * self.pipeline


def kinds(shape: ModelShape) -> list[int]:
    """The first layer of each kind, dense before sparse."""
    layers = range(shape.num_layers)
    firsts = (next((n for n in layers if shape.is_sparse(n) is s), None) for s in (False, True))
    return [layer for layer in firsts if layer is not None]


def sample_shape(shape: ModelShape) -> ModelShape:
    """The model with one layer of each kind."""
    chosen = kinds(shape)
    moe = shape.moe
    if moe:
        moe = replace(moe, sparse=tuple(moe.sparse[layer] for layer in chosen))
    return replace(shape, num_layers=len(chosen), moe=moe)


def repeated_sources(shape: ModelShape, cut: TrainerCut, sets: RankSets) -> Owned:
    """What the trainer ranks hold, numbered from 0."""
    sample = sample_shape(shape)
    layouts = [
        megatron_layout(
            sample,
            Place(
                tensor_rank=rank % cut.tensor,
                tensor_size=cut.tensor,
                expert_rank=rank % cut.expert,
                expert_size=cut.expert,
            ),
        )
        for rank in range(cut.ranks_of_stage)
    ]
    table = owned(layouts, sets)
    last = cut.pipeline - 1
    moved = [_mover(stage * cut.ranks_of_stage) for stage in range(cut.pipeline)]
    stage_of = [layer * cut.pipeline // shape.num_layers for layer in range(shape.num_layers)]
    result: Owned = {}
    for layer, name, sampled in _layers(shape, table):
        move = moved[stage_of[layer]]
        result[name] = {rect: move(ranks) for rect, ranks in table[sampled].items()}
    for name, stages in ((EMBEDDING, [0]), (FINAL_NORM, [last]), (LM_HEAD, [last])):
        if name == EMBEDDING and shape.tied and last:
            stages = [0, last]
        if name in table:
            result[name] = {
                rect: sets.union(tuple(moved[stage](ranks) for stage in stages))
                for rect, ranks in table[name].items()
            }
    return result


def repeated_sinks(
    shape: ModelShape,
    engine: Sequence[Sequence[ShardLayout]],
    num_engines: int,
    sets: RankSets,
    *,
    first_rank: int,
) -> Owned:
    """What the rollout ranks want. engine: layouts of `sample_shape` by tensor rank."""
    table = owned([*engine] * num_engines, sets, first_rank=first_rank)
    result = {name: rects for name, rects in table.items() if not _LAYER.match(name)}
    for _, name, sampled in _layers(shape, table):
        result[name] = table[sampled]
    return result


def _layers(shape: ModelShape, table: Owned) -> list[tuple[int, str, str]]:
    """Layer, name in the model, name in the sample, of every tensor of a layer."""
    chosen = kinds(shape)
    names_of: dict[int, list[tuple[str, str]]] = {}
    for sampled in table:
        if match := _LAYER.match(sampled):
            rest = sampled[match.end() :]
            names_of.setdefault(int(match[1]), []).append((sampled, rest))
    sample_of = {shape.is_sparse(layer): index for index, layer in enumerate(chosen)}
    return [
        (layer, f"model.layers.{layer}.{rest}", sampled)
        for layer in range(shape.num_layers)
        for sampled, rest in names_of[sample_of[shape.is_sparse(layer)]]
    ]


def _mover(shift: int) -> Callable[[Ranks], Ranks]:
    """Adds `shift` to rank tuples; equal tuples come out as one object."""
    known: dict[Ranks, Ranks] = {}

    def move(ranks: Ranks) -> Ranks:
        found = known.get(ranks)
        if found is None:
            found = known[ranks] = tuple(rank + shift for rank in ranks)
        return found

    return move
