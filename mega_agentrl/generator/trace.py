"""Where vLLM puts every element of a checkpoint: learned from its own loader, for any model.

`load_weights` of the model runs once per tensor rank, on placeholders without memory, under
`LoadRecorder`; what it copies is the layout. So there is no table of architectures here: fused
and replicated projections, padded vocabularies, stacked experts and tied embeddings come out as
vLLM treats them. The layouts describe parameters as the loader finds them, before they are
packed for a kernel (vLLM's layerwise reload brings them back to that form).

    trace_destinations   all tensor ranks of an engine, in one process without that engine
    trace_worker         one rank, in the process of a running worker
    trace_model          one rank, for a model that is there already
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mega_agentrl.generator.load_recorder import LoadRecorder, Recorded
from mega_agentrl.generator.stand_in import (
    build_beside,
    build_model,
    model_config,
    standing_in,
)
from mega_agentrl.reshard.layout import ShardLayout, check_cover, check_disjoint
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes as shapes_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mega_agentrl.reshard.layout import Rect

_CAUSE = "probable cause: checkpoint and config.json are of different models"


def trace_destinations(
    model_path: str | Path,
    tensor_size: int,
    dtype: str,
    *,
    hf_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[list[ShardLayout]]:
    """Every parameter of every tensor rank of an engine as blocks of Hugging Face tensors.

    model_path: folder with config.json; weights are not read. dtype: of the engine's parameters,
    a name such as `bfloat16`. hf_shapes: full shape by name of the tensors the trainer sends;
    by default those of the config's architecture. Result: by tensor rank, then in the model's
    order; a parameter that modules share appears once, under its first name. Elements without a
    block are padding. Raises `ValueError` as `trace_model` does, and for a tensor that does not
    land in the engine completely.
    """
    shapes = hf_shapes or shapes_of(ModelShape.from_folder(model_path))
    config = model_config(str(model_path), tensor_size=tensor_size, dtype=dtype)
    layouts = []
    for rank in range(tensor_size):
        with standing_in(config, rank):
            layouts.append(trace_model(build_model(config), shapes, dtype))
    _check_landed(shapes, layouts)
    return layouts


def trace_worker(config: VllmConfig) -> list[ShardLayout]:
    """The layout of the worker that this process is. config: the worker's settings.

    A copy of its model without memory is traced, so the kernels' packed weights stay untouched.
    Raises `ValueError` as `trace_model` does.
    """
    shapes = shapes_of(ModelShape.from_folder(config.model_config.model))
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return trace_model(build_beside(config), shapes, dtype)


def trace_model(
    model: torch.nn.Module, hf_shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[ShardLayout]:
    """Every parameter of one rank's model as blocks; the model keeps its values.

    Its parameters must be as the loader wants them (on any device, meta included), and vLLM's
    groups those of the rank. Raises `ValueError` for an operation that no rectangle describes,
    and for an element that is written twice or never.
    """
    sinks = dict(model.named_parameters()) | dict(model.named_buffers())
    sources = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, shape in hf_shapes.items()
    }
    # Loaders hang attributes on what they are given: hand out views, keep the tensors.
    with torch.no_grad(), LoadRecorder(sources, sinks) as recorder:
        model.load_weights((name, source.detach()) for name, source in sources.items())
    for name, parameter in model.named_parameters():
        _check_written(name, parameter, recorder.recorded.get(name, Recorded()))
    return [
        ShardLayout(name, tuple(sink.shape), tuple(recorder.recorded[name].blocks))
        for name, sink in sinks.items()
        if name in recorder.recorded
    ]


def _check_landed(
    hf_shapes: Mapping[str, tuple[int, ...]], layouts: list[list[ShardLayout]]
) -> None:
    """Refuse a tensor of which the ranks together do not hold everything, replicas aside."""
    blocks = [block for layout in layouts for shard in layout for block in shard.blocks]
    distinct = {(block.hf_name, block.hf_rect): block for block in blocks}
    held = ShardLayout("", (), tuple(distinct.values()))
    check_cover(hf_shapes, [held], owner=f"an engine of {len(layouts)} tensor ranks")


def _check_written(name: str, parameter: torch.Tensor, recorded: Recorded) -> None:
    """Refuse overlaps and holes; a parameter may say itself that a part of it is padding."""
    rects: list[Rect] = [block.local_rect for block in recorded.blocks]
    check_disjoint(name, rects, owner="tracing the weight loader")
    # A loader may clear all of it first.
    twice = [zero.intersect(rect) for zero in recorded.zeros for rect in rects]
    written = sum(rect.numel for rect in [*rects, *recorded.zeros])
    written -= sum(common.numel for common in twice if common)
    # vLLM sets this where a kernel wants more than the checkpoint has.
    expected = getattr(parameter, "weight_loader_numel", parameter.numel())
    if written not in (expected, parameter.numel()):
        loaded = ", ".join(dict.fromkeys(block.hf_name for block in recorded.blocks))
        raise ValueError(
            f"tracing the weight loader: {written} elements of {name} "
            f"{tuple(parameter.shape)} are loaded, from {loaded or 'no tensor'}; expected "
            f"{expected}; {_CAUSE}"
        )
