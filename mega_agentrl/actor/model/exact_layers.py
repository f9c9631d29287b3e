"""Layers of the policy that compute with `numerics`, so that its log-probs are the engine's.

The value of an operation comes from `numerics` and its gradient from the ordinary kernel, which a
pass with gradients therefore runs, too. The difference between the two is rounding.

Shape suffixes: S tokens of this rank, H heads, D head width, A = D / 2 angles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch.nn import functional

from mega_agentrl.actor.megatron_compat import replace_rotation
from mega_agentrl.numerics import layers
from mega_agentrl.numerics.exact_sums import FixedPointRows, exact_matmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer.transformer_config import TransformerConfig


def exact_value(
    ordinary: Callable[[], torch.Tensor], exact: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the value of `exact` with the gradient of `ordinary`, which computes the same."""
    if not torch.is_grad_enabled():
        return exact()
    with torch.no_grad():
        value = exact()
    return _ReplacedValue.apply(ordinary(), value)


class _ReplacedValue(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, __: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class ExactColumnParallelLinear(ColumnParallelLinear):
    """Linear layer whose outputs are split over the tensor ranks."""

    def forward(
        self, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map `[S, 1, in]`, split over the ranks under sequence parallelism, to `[S, 1, out]`."""
        ordinary_forward = super().forward

        def exact() -> torch.Tensor:
            hidden = input_
            if self.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
            rows = FixedPointRows.from_rows(_merged_weight(self))
            output = exact_matmul(hidden, rows, num_terms=hidden.size(-1)).to(input_.dtype)
            return _add_bias(self, output)

        def ordinary() -> torch.Tensor:
            return _add_adapters(self, input_, ordinary_forward(input_, *args, **kwargs)[0])

        output = exact_value(ordinary, exact)
        return output, self.bias if self.skip_bias_add else None


class ExactRowParallelLinear(RowParallelLinear):
    """Linear layer whose inputs are split over the tensor ranks."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map `[S, 1, in]` to `[S, 1, out]`, split over the ranks under sequence parallelism."""
        ordinary_forward = super().forward

        def exact() -> torch.Tensor:
            group = self.tp_group if self.tp_group.size() > 1 else None
            rows = FixedPointRows.from_rows(_merged_weight(self), group)
            total = exact_matmul(input_, rows, num_terms=self.input_size, group=group)
            output = total.to(input_.dtype)
            if self.sequence_parallel:
                output = scatter_to_sequence_parallel_region(output, group=self.tp_group)
            return _add_bias(self, output)

        def ordinary() -> torch.Tensor:
            return _add_adapters(self, input_, ordinary_forward(input_)[0])

        output = exact_value(ordinary, exact)
        return output, self.bias if self.skip_bias_add else None


def _add_bias(layer: Any, output: torch.Tensor) -> torch.Tensor:
    """Add the bias of a linear layer, unless it has none or returns it apart."""
    return output if layer.skip_bias_add or layer.bias is None else output + layer.bias


def _add_adapters(layer: Any, input_: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Add the change of the adapters (`lora`), if the linear layer has any, to its output."""
    return layer.lora(input_, output) if hasattr(layer, "lora") else output


def _merged_weight(layer: Any) -> torch.Tensor:
    """Return the weight that engines compute with, which is merged from adapters if there are."""
    return layer.lora.merged(layer.weight) if hasattr(layer, "lora") else layer.weight


def exact_silu(gate: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + e^-x), as Megatron's `activation_func`."""
    return exact_value(lambda: functional.silu(gate), lambda: layers.silu(gate))


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Compute attention with the arguments of torch's `scaled_dot_product_attention`.

    Without a mask, query i sees the keys 0 .. i; the scale is 1 / sqrt(D).
    """

    def ordinary() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, **options
        )

    def exact() -> torch.Tensor:
        if attn_mask is None:
            visible = torch.ones(query.size(2), key.size(2), dtype=torch.bool).tril()[None, None]
        else:
            visible = attn_mask == 0
        return layers.attention(query, key, value, visible)

    return exact_value(ordinary, exact)


def use_exact_rotation(config: TransformerConfig, attention_factor: float) -> None:
    """Make Megatron's attention rotate queries and keys exactly in models with this config."""
    # Not a field of Megatron's; the rotation gets nothing but the config.
    config.exact_attention_factor = attention_factor
    replace_rotation(_rotate)


def _rotate(
    heads_S1HD: torch.Tensor, angle_S11D: torch.Tensor, config: TransformerConfig, **options: Any
) -> torch.Tensor:
    """Replace Megatron's `apply_rotary_pos_emb`, in exact models and in others alike."""

    def ordinary() -> torch.Tensor:
        return rope_utils.apply_rotary_pos_emb(heads_S1HD, angle_S11D, config, **options)

    factor = getattr(config, "exact_attention_factor", None)
    if factor is None:
        return ordinary()
    angle_SA = angle_S11D[:, 0, 0].chunk(2, dim=-1)[0]  # Megatron repeats the angles

    def exact() -> torch.Tensor:
        return layers.rotate(heads_S1HD.squeeze(1), angle_SA, factor).unsqueeze(1)

    return exact_value(ordinary, exact)
