"""Traces where vLLM's own loader puts every element of a checkpoint, for any model.

`load_weights` of the model runs once per tensor rank, on meta tensors, under `LoadRecorder`; the
copies it makes are the layout. Fused and replicated projections, padded vocabularies, stacked
experts and tied embeddings therefore need no table of architectures. The layouts describe
parameters as the loader expects them, before they are packed for a kernel; vLLM's layerwise reload
restores that form.

    trace_engine_layouts   all tensor ranks of an engine, in one process without that engine
    trace_worker_layout    one rank, in the process of a running worker
    trace_model_layout     one rank, for an existing model

While vLLM builds a model and loads weights, it reads rank and size from module-level groups.
`as_tensor_rank` replaces these groups with stubs, so that one process can act as every rank in
turn. Do not use it in a process that runs an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from mega_agentrl.errors import InputError
from mega_agentrl.generator.vllm_compat import replaced_groups
from mega_agentrl.generator.weights.load_recorder import LoadRecorder, ParamLoad
from mega_agentrl.reshard.layout import ShardLayout, check_cover, check_disjoint
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes as shapes_of
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mega_agentrl.reshard.layout import Rect


class StubGroupCoordinator:
    """Stand-in with the attributes that model code reads from a `GroupCoordinator`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        """Return the number of ranks."""
        return self.world_size


def make_vllm_config(model_path: str, *, tensor_size: int, dtype: str) -> VllmConfig:
    """Return vLLM's config of an engine; reads config.json of the folder but no weights."""
    arguments = EngineArgs(
        model=model_path,
        tensor_parallel_size=tensor_size,
        distributed_executor_backend="mp",  # others require as many GPUs as ranks
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    return arguments.create_engine_config()


@contextmanager
def as_tensor_rank(config: VllmConfig, tensor_rank: int) -> Iterator[None]:
    """Act as one tensor rank of an engine: set groups, current config and default dtype."""
    group = StubGroupCoordinator(tensor_rank, config.parallel_config.tensor_parallel_size)
    with (
        replaced_groups(group, StubGroupCoordinator(0, 1)),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
    ):
        yield


def build_meta_model(config: VllmConfig, device: str = "meta") -> torch.nn.Module:
    """Build the model as its loader expects it; call this within `as_tensor_rank`."""
    # Attention layers register themselves here by name and refuse to do so twice.
    config.compilation_config.static_forward_context.clear()
    with torch.device(device):
        return initialize_model(config)


def build_meta_copy(config: VllmConfig) -> torch.nn.Module:
    """Build the model of a running worker again, on the meta device, with its real groups.

    This is for a worker's own process; neither its model nor its config changes.
    """
    isolated_config = copy.copy(config)
    isolated_config.compilation_config = copy.copy(config.compilation_config)
    isolated_config.compilation_config.static_forward_context = {}
    isolated_config.compilation_config.static_all_moe_layers = []
    with (
        set_current_vllm_config(isolated_config),
        set_default_torch_dtype(config.model_config.dtype),
    ):
        return build_meta_model(isolated_config)


_WRONG_CHECKPOINT_CAUSE = "checkpoint and config.json are of different models"


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
        hf_shapes: Full shape of every tensor that the trainer sends, by name; by default the shapes
            of the config's architecture.

    Returns:
        Layouts by tensor rank, each in the model's order.

    Raises:
        ValueError: If `trace_model_layout` raises it, or if the engine does not load a tensor
            completely.
    """
    shapes = hf_shapes or shapes_of(ModelShape.from_folder(model_path))
    config = make_vllm_config(str(model_path), tensor_size=tensor_size, dtype=dtype)
    layouts = []
    for rank in range(tensor_size):
        with as_tensor_rank(config, rank):
            layouts.append(trace_model_layout(build_meta_model(config), shapes, dtype))
    _check_complete(shapes, layouts)
    return layouts


def trace_worker_layout(config: VllmConfig) -> list[ShardLayout]:
    """Return the layout of the worker in this process.

    A copy of its model on the meta device is traced, so the packed weights stay untouched.

    Raises:
        ValueError: If `trace_model_layout` raises it.
    """
    shapes = shapes_of(ModelShape.from_folder(config.model_config.model))
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return trace_model_layout(build_meta_copy(config), shapes, dtype)


def trace_model_layout(
    model: torch.nn.Module, hf_shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[ShardLayout]:
    """Return every parameter of one rank's model as blocks; the model keeps its values.

    The parameters must be as the loader expects them (on any device, including meta), and vLLM's
    process groups must have the rank's number and size.

    Raises:
        ValueError: For an operation that no rectangle describes, and for an element that is written
            twice or never.
    """
    params = dict(model.named_parameters()) | dict(model.named_buffers())
    sources = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, shape in hf_shapes.items()
    }
    # Loaders set attributes on the tensors that they are given, so they get views.
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
    merged_shard = ShardLayout("", (), tuple(distinct.values()))
    check_cover(hf_shapes, [merged_shard], owner=f"an engine of {len(layouts)} tensor ranks")


def _check_param_coverage(name: str, parameter: torch.Tensor, param_load: ParamLoad) -> None:
    """Raise on overlaps and holes; a parameter may declare that a part of it is padding."""
    rects: list[Rect] = [block.local_rect for block in param_load.blocks]
    check_disjoint(name, rects, owner="tracing the weight loader")
    # A loader may first set the whole parameter to zero.
    overlaps = [zero.intersect(rect) for zero in param_load.zero_rects for rect in rects]
    num_written = sum(rect.numel for rect in [*rects, *param_load.zero_rects])
    num_written -= sum(common.numel for common in overlaps if common)
    # vLLM sets this if a kernel needs more elements than the checkpoint has.
    expected = getattr(parameter, "weight_loader_numel", parameter.numel())
    if num_written not in (expected, parameter.numel()):
        hf_names = ", ".join(dict.fromkeys(block.hf_name for block in param_load.blocks))
        raise InputError(
            name,
            f"{num_written} loaded elements of {tuple(parameter.shape)}, from "
            f"{hf_names or 'no tensor'}",
            f"{expected} elements from the weight loader",
            _WRONG_CHECKPOINT_CAUSE,
        )
