"""Merging of low-rank adapters into weights, by policy ranks and rollout ranks alike.

A weight W with an adapter is W + alpha / rank * B A. Engines get the weights once and from then on
the factors A and B alone, and merge them themselves (`AdapterReceiver`).

Terms of B A are exact in float64, where they are summed; the sum is rounded to float32, scaled,
added to W in float32 and rounded once to the dtype of W. `exact_product` adds the terms of each
element in the same order, whatever part of the matrix a rank holds, so that the results of policy
and engine are equal to the bit and have the same digests. These digests of merged weights prove
that the right factors arrived, and that they were merged with the right scale into the right
weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.lora_layout import adapter_of, lora_shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.frames import PartBatch
    from mega_agentrl.reshard.layout import ShardLayout

_CHUNK_ELEMENTS = 1 << 20
"""Elements of a product that are in float64 at a time."""

Factors = tuple[torch.Tensor, torch.Tensor]
"""B `[out, rank]` and A `[rank, in]` of one adapter, or the parts of them that a rank holds."""


def exact_product(factors: Factors) -> torch.Tensor:
    """Return B A as float32 `[out, in]`, each element with the same bits on any rank.

    It is computed in float64, a few rows at a time.
    """
    left_OR, right_RI = (factor.double() for factor in factors)
    num_columns = right_RI.shape[1]
    product_OI = right_RI.new_empty(len(left_OR), num_columns, dtype=torch.float32)
    num_rows = max(1, _CHUNK_ELEMENTS // num_columns)
    chunks = zip(torch.split(left_OR, num_rows), torch.split(product_OI, num_rows), strict=True)
    for rows_OR, rows_OI in chunks:
        rows_OI.copy_(_add_terms(rows_OR, right_RI))
    return product_OI


def _add_terms(left_OR: torch.Tensor, right_RI: torch.Tensor) -> torch.Tensor:
    sum_OI = left_OR.new_zeros(len(left_OR), right_RI.shape[1])
    term_OI = torch.empty_like(sum_OI)
    for left_O, right_I in zip(left_OR.unbind(1), right_RI.unbind(0), strict=True):
        torch.mul(left_O[:, None], right_I, out=term_OI)
        sum_OI += term_OI
    return sum_OI


def merge_adapters(
    weight: torch.Tensor,
    shard: ShardLayout,
    factors: Mapping[str, Factors],
    scale: float,
) -> torch.Tensor:
    """Return a copy of a rank's weight with the changes of its adapters.

    Args:
        weight: The weight, of any dtype.
        shard: Which parts of which Hugging Face weights it holds.
        factors: The rank's factors by the name of their module; a module without any is copied.
        scale: Factor of the products, alpha / rank.
    """
    merged = weight.clone()
    products: dict[str, torch.Tensor] = {}
    first_row: dict[str, int] = {}
    for block in shard.blocks:
        module = block.hf_name.removesuffix(".weight")
        if module not in factors:
            continue
        if module not in products:
            products[module] = scale * exact_product(factors[module])
            first_row[module] = min(
                other.hf_rect.start[0] for other in shard.blocks if other.hf_name == block.hf_name
            )
        start = block.hf_rect.start[0] - first_row[module]
        change = products[module][start : start + block.hf_rect.shape[0]]
        place = block.local_rect.slices
        merged[place] = (weight[place].float() + change.view(block.local_rect.shape)).to(
            weight.dtype
        )
    return merged


class AdapterReceiver:
    """Receives the factors of a rollout rank's adapters (`executor.WeightWriter`) and merges them.

    Args:
        layout: The weights of the rank.
        lora: Rank, scale and targets.
        dtype: Dtype in which factors are sent.
        device: Device of the weights.
    """

    def __init__(
        self,
        layout: Sequence[ShardLayout],
        lora: LoraConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._scale = lora.alpha / lora.rank
        self.layout: list[ShardLayout] = []
        """The factors that the rank receives."""
        self._values: dict[str, torch.Tensor] = {}
        self._factors: dict[str, dict[str, Factors]] = {}
        self._num_missing = 0
        for shard in layout:
            adapters = lora_shards([shard], lora.rank, lora.targets)
            if not adapters:
                continue
            self.layout += adapters
            by_module: dict[str, dict[str, torch.Tensor]] = {}
            for adapter in adapters:
                value = torch.empty(adapter.shape, dtype=dtype, device=device)
                self._values[adapter.name] = value
                module, factor = adapter_of(adapter.blocks[0].hf_name)
                by_module.setdefault(module, {})[factor] = value
            self._factors[shard.name] = {
                module: (pair["B"], pair["A"]) for module, pair in by_module.items()
            }

    def has_adapters(self, name: str) -> bool:
        """Return whether the weight has any adapters."""
        return name in self._factors

    def begin_update(self) -> None:
        """Expect all factors again."""
        self._num_missing = sum(value.numel() for value in self._values.values())

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        """Copy all parts of a frame to the factors."""
        batch.unpack(frame, self._values)
        self._num_missing -= batch.numel

    def check_complete(self) -> None:
        """End the transfer; raises `ValueError` if factors are missing or came twice."""
        if self._num_missing:
            cause = "a plan that leaves out a slice, or sends one twice"
            raise InputError("missing elements of adapters", self._num_missing, "0", cause)

    def merge(self, shard: ShardLayout, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of a weight with the changes of the received factors."""
        return merge_adapters(weight, shard, self._factors.get(shard.name, {}), self._scale)
