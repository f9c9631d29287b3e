"""Traces where vLLM's own loader puts every element of a checkpoint, for any model.

`load_weights` of the model runs once per tensor rank, on placeholders without memory, under
`LoadRecorder`; the copies it makes are the layout. So no table of architectures is needed: fused
and replicated projections, padded vocabularies, stacked experts and tied embeddings come out as
vLLM treats them. The layouts describe parameters as the loader finds them, before they are packed
for a kernel (vLLM's layerwise reload restores that form).

    trace_engine_layouts   all tensor ranks of an engine, in one process without that engine
    trace_worker_layout    one rank, in the process of a running worker
    trace_model_layout     one rank, for an existing model
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mega_agentrl.generator.weights.load_recorder import LoadRecorder, ParamLoad
from mega_agentrl.generator.weights.meta_model import (
    build_meta_copy,
    build_meta_model,
    fake_tensor_rank,
    make_vllm_config,
)
from mega_agentrl.reshard.layout import ShardLayout, check_cover, check_disjoint
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes as shapes_of
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mega_agentrl.reshard.layout import Rect

_WRONG_CHECKPOINT_CAUSE = "probable cause: checkpoint and config.json are of different models"


def trace_engine_layouts(
    model_path: str | Path,
    tensor_size: int,
    dtype: str,
    *,
    hf_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[list[ShardLayout]]:
    """Return every parameter of every tensor rank of an engine as blocks of Hugging Face tensors.

    Elements without a block are padding. A parameter that modules share appears once, under its
    first name.

    Args:
        model_path: Folder with config.json; weights are not read.
        tensor_size: Number of tensor ranks.
        dtype: Dtype of the engine's parameters, such as `bfloat16`.
        hf_shapes: Full shape by name of the tensors that the trainer sends; by default those of the
            config's architecture.

    Returns:
        Layouts by tensor rank, each in the model's order.

    Raises:
        ValueError: As `trace_model_layout`, and if the engine does not load a tensor completely.
    """
    shapes = hf_shapes or shapes_of(ModelShape.from_folder(model_path))
    config = make_vllm_config(str(model_path), tensor_size=tensor_size, dtype=dtype)
    layouts = []
    for rank in range(tensor_size):
        with fake_tensor_rank(config, rank):
            layouts.append(trace_model_layout(build_meta_model(config), shapes, dtype))
    _check_complete(shapes, layouts)
    return layouts


def trace_worker_layout(config: VllmConfig) -> list[ShardLayout]:
    """Return the layout of the worker that this process is, from the worker's config.

    A copy of its model without memory is traced, so the packed weights stay untouched.

    Raises:
        ValueError: As `trace_model_layout`.
    """
    shapes = shapes_of(ModelShape.from_folder(config.model_config.model))
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return trace_model_layout(build_meta_copy(config), shapes, dtype)


def trace_model_layout(
    model: torch.nn.Module, hf_shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[ShardLayout]:
    """Return every parameter of one rank's model as blocks; the model keeps its values.

    The parameters must be as the loader expects them (on any device, including meta), and vLLM's
    groups must be those of the rank.

    Raises:
        ValueError: For an operation that no rectangle describes, and for an element that is written
            twice or never.
    """
    params = dict(model.named_parameters()) | dict(model.named_buffers())
    sources = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, shape in hf_shapes.items()
    }
    # Loaders set attributes on what they are given, so they get views.
    with torch.no_grad(), LoadRecorder(sources, params) as recorder:
        model.load_weights((name, source.detach()) for name, source in sources.items())
    for name, parameter in model.named_parameters():
        _check_param_coverage(name, parameter, recorder.param_loads.get(name, ParamLoad()))
    return [
        ShardLayout(name, tuple(param.shape), tuple(recorder.param_loads[name].blocks))
        for name, param in params.items()
        if name in recorder.param_loads
    ]


def _check_complete(
    hf_shapes: Mapping[str, tuple[int, ...]], layouts: list[list[ShardLayout]]
) -> None:
    """Raise if the ranks together, replicas aside, do not hold all of a tensor."""
    blocks = [block for layout in layouts for shard in layout for block in shard.blocks]
    distinct = {(block.hf_name, block.hf_rect): block for block in blocks}
    covered = ShardLayout("", (), tuple(distinct.values()))
    check_cover(hf_shapes, [covered], owner=f"an engine of {len(layouts)} tensor ranks")


def _check_param_coverage(name: str, parameter: torch.Tensor, param_load: ParamLoad) -> None:
    """Raise on overlaps and holes; a parameter may declare that a part of it is padding."""
    rects: list[Rect] = [block.local_rect for block in param_load.blocks]
    check_disjoint(name, rects, owner="tracing the weight loader")
    # A loader may first set the whole parameter to zero.
    overlaps = [zero.intersect(rect) for zero in param_load.zero_rects for rect in rects]
    written = sum(rect.numel for rect in [*rects, *param_load.zero_rects])
    written -= sum(common.numel for common in overlaps if common)
    # vLLM sets this if a kernel needs more elements than the checkpoint has.
    expected = getattr(parameter, "weight_loader_numel", parameter.numel())
    if written not in (expected, parameter.numel()):
        loaded = ", ".join(dict.fromkeys(block.hf_name for block in param_load.blocks))
        raise ValueError(
            f"tracing the weight loader: {written} elements of {name} "
            f"{tuple(parameter.shape)} are loaded, from {loaded or 'no tensor'}; expected "
            f"{expected}; {_WRONG_CHECKPOINT_CAUSE}"
        )
