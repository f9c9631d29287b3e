"""vLLM models of any tensor rank on the meta device, without engine, processes or memory.

vLLM asks module-level groups for rank and size while it builds a model and loads weights.
`fake_tensor_rank` replaces them with objects that answer only these two questions, so that one
process can act as every rank in turn; a collective on one of them fails. Do not use it in a process
that runs an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TENSOR_GROUPS = ("_TP", "_EP")
_SINGLE_GROUPS = ("_PP", "_DP", "_PCP", "_DCP")


class FakeGroupCoordinator:
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
    """Return vLLM's config of an engine; reads config.json of the folder but no weights.

    Args:
        model_path: Model folder.
        tensor_size: Number of tensor ranks.
        dtype: Dtype of the parameters.
    """
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
def fake_tensor_rank(config: VllmConfig, tensor_rank: int) -> Iterator[None]:
    """Act as one tensor rank of an engine: set groups, current config and default dtype."""
    names = (*_TENSOR_GROUPS, *_SINGLE_GROUPS)
    before = {name: getattr(parallel_state, name) for name in names}
    tensor_size = config.parallel_config.tensor_parallel_size
    for name in _TENSOR_GROUPS:
        setattr(parallel_state, name, FakeGroupCoordinator(tensor_rank, tensor_size))
    for name in _SINGLE_GROUPS:
        setattr(parallel_state, name, FakeGroupCoordinator(0, 1))
    try:
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def build_meta_model(config: VllmConfig, device: str = "meta") -> torch.nn.Module:
    """Build the model as its loader finds it, within `fake_tensor_rank`."""
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
