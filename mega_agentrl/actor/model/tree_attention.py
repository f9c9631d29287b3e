"""Attention over packed trees with Triton kernels that gather no keys, for GPUs.

The tokens of a tree are in depth-first order, so that those that attend to a token are consecutive:
token i attends to token j if and only if j <= i < end_j (`attention_plan.subtree_ends`). The
kernels (`tree_attention_kernels`) read keys and values where they are and loop over the blocks that
`BlockSparseAttentionPlan` lists. They load no block that is masked as a whole, and compare indices
only in blocks that are masked in part.

The algorithm is FlashAttention-2 (arXiv:2307.08691). The forward pass keeps the output and one
number per query and head, the logarithm of the softmax's sum. In the backward pass one kernel
computes the gradient of the queries; another one, for each block of keys, those of keys and values
over all query heads that share them. Nothing is added up atomically, so that equal inputs give
equal bits. Exponentials and logarithms are to base 2, with the factor of the scores folded in.

On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1 before this module is
imported), for tests without a GPU.

Shape suffixes: S queries of this rank, W packed tokens of all context ranks, H and Hkv heads, D
head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_agentrl.actor.model.attention_plan import BLOCK_TOKENS
from mega_agentrl.actor.model.tree_attention_kernels import (
    forward_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from mega_agentrl.actor.model.attention_plan import BlockLists, BlockSparseAttentionPlan
    from mega_agentrl.actor.model.packed_attention import PackedTreeParams


NUM_WARPS = 4
# Pipelining: a block is computed while the next one is loaded and the number of a third is read.
HOPPER_STAGES = 3
# For the gradients of keys and values, and for GPUs with less shared memory than Hopper and A100.
SHORT_STAGES = 2
LOG2_E = math.log2(math.e)


def tree_attention(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    trees: PackedTreeParams,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention along the paths of each tree.

    Args:
        query_SHD: `[S, H, D]`, D 64 or 128.
        key_WHD: `[W, Hkv, D]` of the same dtype, of all context ranks as gathered.
        value_WHD: `[W, Hkv, D]`, likewise.
        trees: The trees of the micro-batch.
        scale: Factor of the scores, 1 / sqrt(D) by default.

    Returns:
        `[S, H, D]`.

    Raises:
        ValueError: If the shapes do not fit the trees or each other.
    """
    plan = trees.block_sparse_plan
    _check_shapes(query_SHD, key_WHD, value_WHD, plan)
    if plan.key_index_W is not None:
        key_WHD = key_WHD.index_select(0, plan.key_index_W)
        value_WHD = value_WHD.index_select(0, plan.key_index_W)
    scale = query_SHD.size(-1) ** -0.5 if scale is None else scale
    return _TreeAttention.apply(query_SHD, key_WHD, value_WHD, plan, scale)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_SHD: torch.Tensor,
        key_WHD: torch.Tensor,
        value_WHD: torch.Tensor,
        plan: BlockSparseAttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        inputs = [
            tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in (query_SHD, key_WHD, value_WHD)
        ]
        num_queries, num_heads, width = query_SHD.shape
        out_SHD = query_SHD.new_empty(num_queries, num_heads, width)
        lse_HS = query_SHD.new_empty(num_heads, num_queries, dtype=torch.float32)
        with torch.cuda.device_of(query_SHD):
            forward_kernel[(triton.cdiv(num_queries, BLOCK_TOKENS), num_heads)](
                *map(_describe, inputs),
                out_SHD,
                lse_HS,
                *_block_arguments(plan, plan.keys_of_queries),
                plan.num_queries,
                scale * LOG2_E,
                num_stages=_num_stages(query_SHD),
                **_constants(inputs),
            )
        ctx.save_for_backward(*inputs, out_SHD, lse_HS)
        ctx.plan, ctx.scale = plan, scale
        return out_SHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_SHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out_SHD, lse_HS = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        num_keys, num_kv_heads, _ = inputs[1].shape
        grad_out_SHD, delta_HS = grad_out_SHD.contiguous(), torch.empty_like(lse_HS)
        # Contiguous, whatever the strides of the inputs are.
        grad_inputs = [tensor.new_empty(tensor.shape) for tensor in inputs]
        constants = _constants(inputs)
        with torch.cuda.device_of(out_SHD):
            # Writes `delta_HS`, which the other kernel reads.
            query_gradient_kernel[(triton.cdiv(len(out_SHD), BLOCK_TOKENS), out_SHD.size(1))](
                *map(_describe, (*inputs, out_SHD, grad_out_SHD)),
                lse_HS,
                delta_HS,
                grad_inputs[0],
                *_block_arguments(plan, plan.keys_of_queries),
                plan.num_queries,
                scale,
                scale * LOG2_E,
                num_stages=_num_stages(out_SHD),
                **constants,
            )
            key_value_gradient_kernel[(triton.cdiv(num_keys, BLOCK_TOKENS), num_kv_heads)](
                *inputs,
                grad_out_SHD,
                lse_HS,
                delta_HS,
                *grad_inputs[1:],
                *_block_arguments(plan, plan.queries_of_keys),
                plan.num_queries,
                plan.num_keys,
                *(stride for tensor in inputs for stride in tensor.stride()[:2]),
                scale,
                scale * LOG2_E,
                num_stages=SHORT_STAGES,
                **constants,
            )
        return *grad_inputs, None, None


def _check_shapes(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    plan: BlockSparseAttentionPlan,
) -> None:
    (num_queries, num_heads, width), (num_keys, num_kv_heads, _) = query_SHD.shape, key_WHD.shape
    shapes_match = key_WHD.shape == value_WHD.shape == (num_keys, num_kv_heads, width)
    if (
        not shapes_match
        or num_heads % num_kv_heads
        or (num_queries, num_keys) != (plan.num_queries, plan.num_keys)
    ):
        raise InputError(
            "shapes of query, key and value",
            [tuple(part.shape) for part in (query_SHD, key_WHD, value_WHD)],
            f"[{plan.num_queries}, H, D] and twice [{plan.num_keys}, Hkv, D] with H a multiple of "
            "Hkv",
            "the trees of another micro-batch",
        )


def _is_aligned(value: torch.Tensor) -> bool:
    """Return whether each head of `[S, H, D]` values is contiguous and aligned to 16 bytes.

    Descriptors need that.
    """
    places = (value.data_ptr(), *(n * value.element_size() for n in value.stride()[:2]))
    return value.stride(2) == 1 and not any(place % 16 for place in places)


def _describe(value: torch.Tensor) -> TensorDescriptor:
    """Return a descriptor of `[S, H, D]` values for the tiles of a head."""
    return TensorDescriptor.from_tensor(value, [BLOCK_TOKENS, 1, value.size(2)])


def _block_arguments(
    plan: BlockSparseAttentionPlan, lists: BlockLists
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return plan.token_S, plan.end_W, lists.bounds, lists.block_L


def _constants(inputs: list[torch.Tensor]) -> dict[str, Any]:
    query_SHD, key_WHD, _ = inputs
    return {
        "HEADS": query_SHD.size(1),
        "KV_HEADS": key_WHD.size(1),
        "WIDTH": query_SHD.size(2),
        "BLOCK": BLOCK_TOKENS,
        # The interpreter's product misreads bfloat16 as integers; float32 gives the same result.
        "WIDEN": not query_SHD.is_cuda,
        "num_warps": NUM_WARPS,
    }


def _num_stages(query_SHD: torch.Tensor) -> int:
    """Return the stages of the kernels that own queries."""
    if not query_SHD.is_cuda:
        return HOPPER_STAGES
    properties = torch.cuda.get_device_properties(query_SHD.device)
    has_large_smem = properties.shared_memory_per_block_optin >= 160 << 10
    return HOPPER_STAGES if has_large_smem else SHORT_STAGES
