"""The Triton kernels of `tree_attention`: forward, gradient of queries, of keys and values.

A program owns a block of BLOCK tokens of one head, queries or keys. It loops over the blocks of
the other side that are listed for it: first those that are masked in part, then those that are
visible as a whole (`attention_plan.BlockLists`). The arrays of packed indices and ends are padded
to whole blocks, so that nothing attends to what a tile has beyond the last token or is attended to
by it: 0 in the kernels that read through tensor descriptors, which Hopper's copy engine (TMA)
serves, and the last row again in the one that reads through pointers, which is faster there.

Queries have `[S, H, D]` with any strides of the first two dims, keys and values `[W, Hkv, D]`
likewise; outputs and gradients are contiguous; numbers per query are `[H, S]` float32. Matrix
products are summed in float32. `token_ptr`, `end_ptr`, `bounds_ptr` and `block_ptr` point to the
tensors of `attention_plan.BlockSparseAttentionPlan`. `scale` is the factor of the scores, and
`exponent_factor` is `scale` times log2(e), for exponents of 2. With WIDEN the factors of products
are converted to float32.

Shape suffixes: Q queries and K keys of a program's tile, D head size; R rows of any tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(
    left: tl.tensor, right: tl.tensor, addend: tl.tensor | None, WIDEN: tl.constexpr
) -> tl.tensor:
    """Return the float32 matrix product, plus `addend` if that is not None."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, addend, input_precision="ieee")


@triton.jit
def _is_visible(token: tl.tensor, key: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Return whether queries attend to keys, from their packed indices and the ends of the keys."""
    return (key <= token) & (token < end)


@triton.jit
def _clamped_rows(start: tl.tensor, num_rows: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Return the rows of a tile relative to its start; the last tile repeats its last row."""
    return tl.minimum(tl.arange(0, ROWS), num_rows - start - 1)


@triton.jit
def _load_tile(
    head_ptr: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load `[ROWS, WIDTH]` of one head from row `start` on."""
    row_R = _clamped_rows(start, num_rows, ROWS)
    offset_RD = row_R[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(head_ptr + start.to(tl.int64) * stride + offset_RD)


@triton.jit
def _read_tile(
    desc: tl.tensor_descriptor,
    start: tl.tensor,
    head: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Read `[ROWS, WIDTH]` of one head from row `start` on, with 0 beyond the last row."""
    return desc.load([start, head, 0]).reshape(ROWS, WIDTH)


@triton.jit
def _store_tile(
    head_ptr: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.constexpr,
    value_RD: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Store `[ROWS, WIDTH]` of one head from row `start` on, in the dtype of the pointer."""
    row_R = tl.arange(0, ROWS)
    offset_RD = row_R[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(
        head_ptr + start.to(tl.int64) * stride + offset_RD,
        value_RD.to(head_ptr.dtype.element_ty),
        mask=(row_R < num_rows - start)[:, None],
    )


@triton.jit
def forward_kernel(
    query_desc: tl.tensor_descriptor,
    key_desc: tl.tensor_descriptor,
    value_desc: tl.tensor_descriptor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    token_ptr: tl.tensor,
    end_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    block_ptr: tl.tensor,
    num_queries: tl.tensor,
    exponent_factor: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write output and base-2 log-sum-exp of one block of queries of one head."""
    program, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    start = program * BLOCK
    query_Q = start + tl.arange(0, BLOCK)
    token_Q = tl.load(token_ptr + query_Q)
    query_QD = _read_tile(query_desc, start, head, BLOCK, WIDTH)
    # Finite, because in a block without visible keys -inf - -inf would be NaN.
    max_Q = tl.full((BLOCK,), -1e38, dtype=tl.float32)
    sum_Q = tl.zeros((BLOCK,), dtype=tl.float32)
    out_QD = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for is_full in tl.static_range(2):
        bound_ptr = bounds_ptr + 2 * program + is_full
        for entry in range(tl.load(bound_ptr), tl.load(bound_ptr + 1)):
            first_key = tl.load(block_ptr + entry) * BLOCK
            key_KD = _read_tile(key_desc, first_key, kv_head, BLOCK, WIDTH)
            x_QK = _product(query_QD, tl.trans(key_KD), None, WIDEN) * exponent_factor
            if is_full == 0:
                key_K = first_key + tl.arange(0, BLOCK)
                end_K = tl.load(end_ptr + key_K)
                is_visible_QK = _is_visible(token_Q[:, None], key_K[None, :], end_K[None, :])
                x_QK = tl.where(is_visible_QK, x_QK, float("-inf"))
            new_max_Q = tl.maximum(max_Q, tl.max(x_QK, axis=1))
            weight_QK = tl.exp2(x_QK - new_max_Q[:, None])
            decay_Q = tl.exp2(max_Q - new_max_Q)
            sum_Q = sum_Q * decay_Q + tl.sum(weight_QK, axis=1)
            out_QD = out_QD * decay_Q[:, None]
            value_KD = _read_tile(value_desc, first_key, kv_head, BLOCK, WIDTH)
            out_QD = _product(weight_QK.to(value_KD.dtype), value_KD, out_QD, WIDEN)
            max_Q = new_max_Q
    # Only the padding after the last query attends to nothing.
    sum_Q = tl.where(token_Q < 0, 1.0, sum_Q)
    out_QD = out_QD / sum_Q[:, None]
    _store_tile(out_ptr + head * WIDTH, start, num_queries, HEADS * WIDTH, out_QD, BLOCK, WIDTH)
    lse_ptr += head.to(tl.int64) * num_queries
    tl.store(lse_ptr + query_Q, max_Q + tl.log2(sum_Q), mask=query_Q < num_queries)


@triton.jit
def query_gradient_kernel(
    query_desc: tl.tensor_descriptor,
    key_desc: tl.tensor_descriptor,
    value_desc: tl.tensor_descriptor,
    out_desc: tl.tensor_descriptor,
    grad_out_desc: tl.tensor_descriptor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    grad_query_ptr: tl.tensor,
    token_ptr: tl.tensor,
    end_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    block_ptr: tl.tensor,
    num_queries: tl.tensor,
    scale: tl.tensor,
    exponent_factor: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write the gradient of one block of queries of one head, and delta of these queries.

    Delta is the sum of output times gradient over the head; the other gradients need it, too.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    start = program * BLOCK
    query_QD = _read_tile(query_desc, start, head, BLOCK, WIDTH)
    grad_out_QD = _read_tile(grad_out_desc, start, head, BLOCK, WIDTH)
    out_QD = _read_tile(out_desc, start, head, BLOCK, WIDTH)
    delta_Q = tl.sum(out_QD.to(tl.float32) * grad_out_QD.to(tl.float32), axis=1)
    query_Q = start + tl.arange(0, BLOCK)
    head_offset = head.to(tl.int64) * num_queries
    tl.store(delta_ptr + head_offset + query_Q, delta_Q, mask=query_Q < num_queries)
    lse_Q = tl.load(lse_ptr + head_offset + start + _clamped_rows(start, num_queries, BLOCK))
    token_Q = tl.load(token_ptr + query_Q)
    grad_query_QD = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for is_full in tl.static_range(2):
        bound_ptr = bounds_ptr + 2 * program + is_full
        for entry in range(tl.load(bound_ptr), tl.load(bound_ptr + 1)):
            first_key = tl.load(block_ptr + entry) * BLOCK
            key_KD = _read_tile(key_desc, first_key, kv_head, BLOCK, WIDTH)
            value_KD = _read_tile(value_desc, first_key, kv_head, BLOCK, WIDTH)
            x_QK = _product(query_QD, tl.trans(key_KD), None, WIDEN) * exponent_factor
            prob_QK = tl.exp2(x_QK - lse_Q[:, None])
            if is_full == 0:
                key_K = first_key + tl.arange(0, BLOCK)
                end_K = tl.load(end_ptr + key_K)
                is_visible_QK = _is_visible(token_Q[:, None], key_K[None, :], end_K[None, :])
                prob_QK = tl.where(is_visible_QK, prob_QK, 0.0)
            grad_prob_QK = _product(grad_out_QD, tl.trans(value_KD), None, WIDEN)
            grad_score_QK = prob_QK * (grad_prob_QK - delta_Q[:, None])
            grad_query_QD = _product(grad_score_QK.to(key_KD.dtype), key_KD, grad_query_QD, WIDEN)
    grad_query_QD *= scale
    grad_query_ptr += head * WIDTH
    _store_tile(grad_query_ptr, start, num_queries, HEADS * WIDTH, grad_query_QD, BLOCK, WIDTH)


@triton.jit
def key_value_gradient_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    grad_out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    grad_key_ptr: tl.tensor,
    grad_value_ptr: tl.tensor,
    token_ptr: tl.tensor,
    end_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    block_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    scale: tl.tensor,
    exponent_factor: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write the gradients of one block of keys and values, summed over their query heads."""
    program, kv_head = tl.program_id(0), tl.program_id(1)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride
    start = program * BLOCK
    key_KD = _load_tile(key_ptr, start, num_keys, key_stride, BLOCK, WIDTH)
    value_KD = _load_tile(value_ptr, start, num_keys, value_stride, BLOCK, WIDTH)
    key_K = start + tl.arange(0, BLOCK)
    end_K = tl.load(end_ptr + key_K)
    grad_key_KD = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    grad_value_KD = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    stride: tl.constexpr = HEADS * WIDTH
    for group_head in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + group_head
        head_query_ptr = query_ptr + head * query_head_stride
        head_grad_out_ptr = grad_out_ptr + head * WIDTH
        head_offset = head.to(tl.int64) * num_queries
        for is_full in tl.static_range(2):
            bound_ptr = bounds_ptr + 2 * program + is_full
            for entry in range(tl.load(bound_ptr), tl.load(bound_ptr + 1)):
                first_query = tl.load(block_ptr + entry) * BLOCK
                clamped_Q = first_query + _clamped_rows(first_query, num_queries, BLOCK)
                query_QD = _load_tile(
                    head_query_ptr, first_query, num_queries, query_stride, BLOCK, WIDTH
                )
                x_KQ = _product(key_KD, tl.trans(query_QD), None, WIDEN) * exponent_factor
                lse_Q = tl.load(lse_ptr + head_offset + clamped_Q)
                prob_KQ = tl.exp2(x_KQ - lse_Q[None, :])
                if is_full == 0:
                    token_Q = tl.load(token_ptr + first_query + tl.arange(0, BLOCK))
                    is_visible_KQ = _is_visible(token_Q[None, :], key_K[:, None], end_K[:, None])
                    prob_KQ = tl.where(is_visible_KQ, prob_KQ, 0.0)
                grad_out_QD = _load_tile(
                    head_grad_out_ptr, first_query, num_queries, stride, BLOCK, WIDTH
                )
                grad_value_KD = _product(
                    prob_KQ.to(grad_out_QD.dtype), grad_out_QD, grad_value_KD, WIDEN
                )
                grad_prob_KQ = _product(value_KD, tl.trans(grad_out_QD), None, WIDEN)
                delta_Q = tl.load(delta_ptr + head_offset + clamped_Q)
                grad_score_KQ = prob_KQ * (grad_prob_KQ - delta_Q[None, :])
                grad_key_KD = _product(
                    grad_score_KQ.to(query_QD.dtype), query_QD, grad_key_KD, WIDEN
                )
    grad_key_KD *= scale
    grad_key_ptr += kv_head * WIDTH
    grad_value_ptr += kv_head * WIDTH
    _store_tile(grad_key_ptr, start, num_keys, KV_HEADS * WIDTH, grad_key_KD, BLOCK, WIDTH)
    _store_tile(grad_value_ptr, start, num_keys, KV_HEADS * WIDTH, grad_value_KD, BLOCK, WIDTH)
