"""Experts of a rank as one grouped matrix product, for Megatron layers without Transformer Engine.

The parameters are those of Megatron's `SequentialMLP`, one module per expert, so that checkpoints,
weight transfer and export find them under the same names. Forward and backward pass stack the
weights of a layer only for a product, so that the copy takes no memory between the passes.

Shape suffixes: T routed tokens of this rank, sorted by expert, E experts of this rank, N output and
K input width of a linear layer, D hidden width, F inner width of an expert.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNMENT_BYTES = 16
"""Bytes that the rows of all operands of a grouped product must be a multiple of."""


class GroupedExperts(SequentialMLP):
    """`SequentialMLP` that computes its experts together where torch supports grouped products."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Map `[T, D]` tokens, `[E]` counts and `[T]` router weights to `[T, D]` outputs."""
        hidden_TD, prob_T = permuted_local_hidden_states, permuted_probs
        fc1, fc2 = (
            [getattr(expert, name) for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        if not (
            len(fc1) > 1
            and len(hidden_TD)
            and supports_grouped_mm(hidden_TD.device, hidden_TD.dtype)
            and all(map(has_aligned_rows, (*_operands(fc1[0]), *_operands(fc2[0]))))
        ):
            return super().forward(hidden_TD, tokens_per_expert, prob_T)
        counts_E = tokens_per_expert.to(hidden_TD.device)
        end_E = counts_E.cumsum(0, dtype=torch.int32)
        inner_T2F = _apply_layers(hidden_TD, end_E, fc1)
        if self.config.bias_activation_fusion:
            inner_TF = weighted_bias_swiglu_impl(inner_T2F, None, prob_T[:, None])
        else:
            gate_TF, up_TF = inner_T2F.chunk(2, dim=-1)
            inner_TF = functional.silu(gate_TF) * up_TF
            inner_TF = (inner_TF * prob_T[:, None]).to(hidden_TD.dtype)
        return _apply_layers(inner_TF, end_E, fc2), None


def _operands(layer: Any) -> tuple[torch.Tensor, ...]:
    """Return the weight of a linear layer and the factors of its adapters, if it has any."""
    return (layer.weight, *(layer.lora.joined_factors() if hasattr(layer, "lora") else ()))


def _apply_layers(
    value_TK: torch.Tensor, end_E: torch.Tensor, layers: Sequence[Any]
) -> torch.Tensor:
    """Return the `[T, N]` output of the linear layer of each token's expert."""
    weights, *factors = zip(*map(_operands, layers), strict=True)
    output_TN = grouped_linear(value_TK, end_E, weights)
    if not factors:
        return output_TN
    low_TR = grouped_linear(value_TK, end_E, factors[0])
    change_TN = grouped_linear(low_TR, end_E, factors[1])
    return torch.add(output_TN, change_TN, alpha=layers[0].lora.scale)


def grouped_linear(
    value_TK: torch.Tensor, end_E: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Multiply each token by the weight of its expert, with gradients for both.

    Args:
        value_TK: `[T, K]` tokens, sorted by expert.
        end_E: `[E]` int32, one past the last token of each expert.
        weights: One `[N, K]` weight per expert.

    Returns:
        `[T, N]` products.
    """
    return _GroupedLinear.apply(value_TK, end_E, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value_TK: torch.Tensor, end_E: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(value_TK, end_E, *weights)
        weight_ENK = torch.stack(weights)
        return functional.grouped_mm(value_TK, weight_ENK.transpose(1, 2), offs=end_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value_TK, end_E, *weights = ctx.saved_tensors
        needs_value_grad, _, *needs_weight_grad = ctx.needs_input_grad
        grad_TN, grad_TK = grad_TN.contiguous(), None
        if needs_value_grad:
            grad_TK = functional.grouped_mm(grad_TN, torch.stack(weights), offs=end_E)
        if not any(needs_weight_grad):
            return grad_TK, None, *(None for _ in weights)
        grad_ENK = functional.grouped_mm(grad_TN.t(), value_TK, offs=end_E)
        # A kernel may leave the sum over no tokens unwritten.
        is_idle_E = end_E.diff(prepend=end_E.new_zeros(1)) == 0
        grad_ENK.masked_fill_(is_idle_E[:, None, None], 0)
        return grad_TK, None, *grad_ENK.unbind()


def has_aligned_rows(weight_NK: torch.Tensor) -> bool:
    """Return whether rows of a weight and of its products are multiples of `_ALIGNMENT_BYTES`."""
    element_bytes = weight_NK.element_size()
    return all(size * element_bytes % _ALIGNMENT_BYTES == 0 for size in weight_NK.shape)


@cache
def supports_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch computes grouped products of this dtype on the device; tries it."""
    value_TK = torch.zeros(32, 16, dtype=dtype, device=device)
    weight_ENK = torch.zeros(2, 16, 16, dtype=dtype, device=device)
    end_E = torch.tensor([16, 32], dtype=torch.int32, device=device)
    try:
        functional.grouped_mm(value_TK, weight_ENK.transpose(1, 2), offs=end_E)
        functional.grouped_mm(value_TK.t(), value_TK, offs=end_E)
    except (AttributeError, RuntimeError):
        # torch lacks the function, or a kernel for this dtype or device.
        return False
    return True
