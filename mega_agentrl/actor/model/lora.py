"""Low-rank adapters of the linear layers, whose own weights are frozen.

A layer with adapters computes y = W x + s B (A x), with s = alpha / rank (arXiv 2106.09685); the
sum W + s B A is formed where it is sent or exported (`reshard.adapters`) and, for log-probs that
equal the engine's, by `exact_layers`. Engines round that sum to the dtype of the weights, so that
policy and engine differ by a rounding of each weight. Memory for gradients and optimizer is that of
the adapters.

The factors of a layer are joined, so that it has one product with all A and one with all B. A
weight that is split over the tensor ranks has one factor that all of them hold (`lora_layout`):

    column-parallel    A is held by all, and A x is exchanged as the input of the layer is: gathered
                       under sequence parallelism, else equal on all ranks, its gradient summed
    row-parallel       B is held by all, and A x is summed as the output of the layer is
    experts            their inputs and outputs are exchanged outside of them, so that the gradient
                       of the factor that all hold is summed in the backward pass

Under sequence parallelism the factor that all ranks hold meets a part of the tokens on each, and
Megatron sums its gradient after the last micro-batch (`gpt_model.set_grad_sync_flags`).

Shape suffixes: I inputs, O outputs, R joined ranks of a layer's adapters.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.actor.model.exact_layers import (
    ExactColumnParallelLinear,
    ExactRowParallelLinear,
)
from mega_agentrl.reshard.adapters import merge_adapters
from mega_agentrl.reshard.mapping.lora_layout import adapter_of, is_lora_replicated, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import is_expert_param

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.actor.parallel.process_groups import ParallelGroups
    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.layout import ShardLayout

_EXCHANGES = {
    (True, True): gather_from_sequence_parallel_region,
    (True, False): copy_to_tensor_model_parallel_region,
    (False, True): reduce_scatter_to_sequence_parallel_region,
    (False, False): reduce_from_tensor_model_parallel_region,
}
"""Exchange of A x between tensor ranks, by whether the layer is column-parallel and under sequence
parallelism."""


class LowRankFactors(torch.nn.Module):
    """The factors of one Hugging Face weight on this rank, without values."""

    def __init__(self, shape_a: tuple[int, ...], shape_b: tuple[int, ...], dtype: Any) -> None:
        super().__init__()
        options = {"dtype": dtype, "device": device.current_device()}
        self.A = torch.nn.Parameter(torch.empty(shape_a, **options))
        self.B = torch.nn.Parameter(torch.empty(shape_b, **options))


class LoraWeight(torch.nn.ModuleDict):
    """The adapters of one weight of a rank, which may join several Hugging Face weights.

    Args:
        shard: The weight.
        config: Rank, scale and targets.
        dtype: Dtype of the factors.
        groups: The process groups.
        sequence: Whether the layer is under sequence parallelism.
    """

    def __init__(
        self,
        shard: ShardLayout,
        config: LoraConfig,
        dtype: torch.dtype,
        groups: ParallelGroups,
        *,
        sequence: bool,
    ) -> None:
        adapters = lora_shards([shard], config.rank, config.targets)
        shapes = {adapter.name: adapter.shape for adapter in adapters}
        modules = {
            adapter.name.rpartition(".")[0]: adapter_of(adapter.blocks[0].hf_name)[0]
            for adapter in adapters
        }
        super().__init__(
            {
                prefix.rpartition(".")[2]: LowRankFactors(
                    shapes[f"{prefix}.A"], shapes[f"{prefix}.B"], dtype
                )
                for prefix in modules
            }
        )
        self.scale = config.alpha / config.rank
        """Factor of the products."""
        self._shard = shard
        self._modules_of_keys = tuple(modules.values())
        self._rows_of_keys = [_rows_of(shard, module) for module in self._modules_of_keys]
        collection = groups.pg_collection
        self._is_expert = is_expert_param(shard.name)
        self._group = collection.expt_tp if self._is_expert else collection.tp
        self._is_column_parallel = is_lora_replicated(f"{next(iter(modules))}.A")
        self._exchange = _EXCHANGES[self._is_column_parallel, sequence]

    def forward(self, input_: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the `[..., O]` output of the layer for its input, with the adapters' change."""
        right_RI, left_OR = self.joined_factors()
        low = functional.linear(input_, right_RI)
        if not self._is_expert and self._group.size() > 1:
            low = self._exchange(low, group=self._group)
        changed = torch.addmm(
            output.flatten(0, -2), low.flatten(0, -2), left_OR.t(), alpha=self.scale
        )
        return changed.view_as(output)

    def joined_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[R, I]` A and `[O, R]` B of all adapters, whose product is B A of the weight."""
        right_RI = torch.cat([own.A for own in self.values()])
        left_OR = right_RI.new_zeros(self._shard.shape[0], len(right_RI))
        first = 0
        for rows_O, own in zip(self._rows_of_keys, self.values(), strict=True):
            left_OR[rows_O, first : first + len(own.A)] = own.B
            first += len(own.A)
        if not self._is_expert or self._group.size() == 1:
            return right_RI, left_OR
        if self._is_column_parallel:
            return copy_to_tensor_model_parallel_region(right_RI, group=self._group), left_OR
        return right_RI, copy_to_tensor_model_parallel_region(left_OR, group=self._group)

    @torch.no_grad()
    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the weight that the engines have, with equal bits in any layout."""
        factors = {
            module: (own.B, own.A)
            for module, own in zip(self._modules_of_keys, self.values(), strict=True)
        }
        return merge_adapters(weight_OI, self._shard, factors, self.scale)


def _rows_of(shard: ShardLayout, module: str) -> torch.Tensor:
    """Return `[O]` int64 row of the weight that belongs to each of its rows of a module."""
    blocks = [block for block in shard.blocks if block.hf_name == f"{module}.weight"]
    rows = [
        torch.arange(block.local_rect.start[0], block.local_rect.stop[0])
        for block in sorted(blocks, key=lambda block: block.hf_rect.start)
    ]
    return torch.cat(rows).to(device.current_device())


def attach_adapters(
    chunks: Sequence[torch.nn.Module],
    shards: Sequence[ShardLayout],
    config: LoraConfig,
    dtype: torch.dtype,
    groups: ParallelGroups,
) -> dict[str, LoraWeight]:
    """Give the target layers of the chunks their adapters, without values.

    Args:
        chunks: The chunks of this rank.
        shards: The weights of this rank.
        config: Rank, scale and targets.
        dtype: Dtype of the factors.
        groups: The process groups.

    Returns:
        The adapters by the name of their weight in `shards`.
    """
    mp_rank = groups.coordinates.model_parallel_rank
    adapters: dict[str, LoraWeight] = {}
    for shard in shards:
        if not lora_shards([shard], config.rank, config.targets):
            continue
        number, chunk = next(
            (number, chunk)
            for number, chunk in enumerate(chunks)
            if shard.name.startswith(mp_rank.param_prefix(number))
        )
        path = shard.name.removeprefix(mp_rank.param_prefix(number)).removesuffix(".weight")
        layer = chunk.get_submodule(path)
        layer.lora = adapters[shard.name] = LoraWeight(
            shard, config, dtype, groups, sequence=layer.sequence_parallel
        )
        if not isinstance(layer, (ExactColumnParallelLinear, ExactRowParallelLinear)):
            layer.forward = partial(_forward_with_adapters, layer, layer.forward)
    for chunk in chunks:
        if (embedding := getattr(chunk, "embedding", None)) is not None:
            embedding.register_forward_hook(_require_gradient)
    return adapters


@torch.no_grad()
def init_adapters(
    shards: Sequence[ShardLayout],
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, torch.Tensor],
    seed: int,
) -> None:
    """Set A to PEFT's uniform random values and B to 0, in any layout alike.

    Args:
        shards: The parameters of the adapters.
        shapes: Full shapes of their tensors.
        parameters: All parameters by name.
        seed: Seed of the random values.
    """
    for shard in shards:
        (block,) = shard.blocks
        parameter = parameters[shard.name]
        if block.hf_name.endswith("lora_B.weight"):
            parameter.zero_()
            continue
        digest = hashlib.blake2b(f"{seed}/{block.hf_name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        rank, num_columns = shapes[block.hf_name]
        values_IR = torch.rand(num_columns, rank, generator=generator)
        (_, first), (_, stop) = block.hf_rect.start, block.hf_rect.stop
        parameter.copy_((2 * values_IR[first:stop].t() - 1) / math.sqrt(num_columns))


def _require_gradient(_: Any, __: Any, embedded: torch.Tensor) -> None:
    # Recomputed layers pass gradients on only if their input requires one.
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def _forward_with_adapters(
    layer: Any, forward: Any, input_: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, bias = forward(input_, *args, **kwargs)
    return layer.lora(input_, output), bias
