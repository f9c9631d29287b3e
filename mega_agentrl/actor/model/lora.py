"""Low-rank adapters of the linear layers, whose own weights are frozen.

A layer with adapters computes with W + alpha / rank * B A (`reshard.adapters`). The sum is formed
again in each pass, which costs as much as `rank` more tokens. So the adapters work in every
parallel layout, with recomputation and grouped experts. Engines and exported folders have the same
weights, but for a rounding in about one of 10^8 elements, and none with `exact`. Memory for
gradients and optimizer is that of the adapters; merged weights are kept for the backward pass.

Each tensor rank sees the gradient of its own part of a weight. The gradient of a factor that all
tensor ranks hold (`lora_layout`) is summed over them in the backward pass.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from mega_agentrl.actor import device
from mega_agentrl.actor.model.exact_layers import exact_value
from mega_agentrl.reshard.adapters import exact_product, fast_product, merge_adapters
from mega_agentrl.reshard.mapping.lora_layout import adapter_of, is_lora_replicated, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import is_expert_param

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.actor.parallel.process_groups import ParallelGroups
    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.adapters import Factors
    from mega_agentrl.reshard.layout import ShardLayout


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
        exact: Whether to compute with the very weight that engines merge.
    """

    def __init__(
        self,
        shard: ShardLayout,
        config: LoraConfig,
        dtype: torch.dtype,
        groups: ParallelGroups,
        *,
        exact: bool = False,
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
        self._shard = shard
        self._exact = exact
        self._scale = config.alpha / config.rank
        self._modules_of_keys = tuple(modules.values())
        collection = groups.pg_collection
        self._group = collection.expt_tp if is_expert_param(shard.name) else collection.tp
        self._replicated = {
            factor: is_lora_replicated(f"{next(iter(modules))}.{factor}") for factor in "AB"
        }

    def forward(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the `[out, in]` weight with the changes of the adapters."""

        def ordinary() -> torch.Tensor:
            return self._merge(weight_OI, fast_product)

        return exact_value(ordinary, lambda: self.merged(weight_OI)) if self._exact else ordinary()

    @torch.no_grad()
    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the weight that the engines have, with equal bits in any layout."""
        return self._merge(weight_OI, exact_product)

    def _merge(
        self, weight_OI: torch.Tensor, product: Callable[[Factors], torch.Tensor]
    ) -> torch.Tensor:
        factors = {
            module: (self._gathering("B", own.B), self._gathering("A", own.A))
            for module, own in zip(self._modules_of_keys, self.values(), strict=True)
        }
        return merge_adapters(weight_OI, self._shard, factors, self._scale, product)

    def _gathering(self, factor: str, value: torch.Tensor) -> torch.Tensor:
        """Return a factor whose gradient is summed over the tensor ranks if all of them hold it."""
        if not self._replicated[factor] or self._group.size() == 1:
            return value
        return copy_to_tensor_model_parallel_region(value, group=self._group)


def attach_adapters(
    chunks: Sequence[torch.nn.Module],
    shards: Sequence[ShardLayout],
    config: LoraConfig,
    dtype: torch.dtype,
    groups: ParallelGroups,
    *,
    exact: bool = False,
) -> dict[str, LoraWeight]:
    """Give the target layers of the chunks their adapters, without values.

    Args:
        chunks: The chunks of this rank.
        shards: The weights of this rank.
        config: Rank, scale and targets.
        dtype: Dtype of the factors.
        groups: The process groups.
        exact: Whether to compute with the very weights that engines merge.

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
        layer.lora = adapters[shard.name] = LoraWeight(shard, config, dtype, groups, exact=exact)
        _compute_with_adapters(layer)
    for chunk in chunks:
        if (embedding := getattr(chunk, "embedding", None)) is not None:
            embedding.register_forward_hook(_require_gradient)
    return adapters


def effective_weight(layer: Any) -> torch.Tensor:
    """Return the weight that a linear layer computes with."""
    weight: torch.Tensor = layer.weight
    return layer.lora(weight) if hasattr(layer, "lora") else weight


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


def _compute_with_adapters(layer: Any) -> None:
    """Let a layer's forward pass use `effective_weight`."""
    forward, own = layer.forward, layer._parameters

    def forward_with_adapters(*args: Any, **kwargs: Any) -> Any:
        weight = own["weight"]
        own["weight"] = layer.lora(weight)
        try:
            return forward(*args, **kwargs)
        finally:
            own["weight"] = weight

    layer.forward = forward_with_adapters
