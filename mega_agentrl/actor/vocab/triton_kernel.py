"""Statistics and gradients of one rank's vocabulary columns, with Triton kernels for GPUs.

Forward: a program processes a block of tokens against a run of vocabulary blocks. The logits of
a block stay in registers and are merged into the running statistics of the tokens (online
softmax), so only four numbers per token and run are written. Backward: the same product is
computed again, turned into the gradient of the logits in registers and written once, in the
dtype of the inputs, to a bounded `[C, B]` scratch, which torch's matrix product then multiplies
into both gradients.

Inputs are float32, bfloat16 or float16; products are summed in float32 (for float32 inputs
without TF32). Tiles are read and written through tensor descriptors, which Hopper's copy engine
(TMA) serves; reads beyond the end give 0 and writes there are dropped. Concurrent programs share
token and vocabulary blocks through the L2 cache: groups of token blocks go through the vocabulary
together. On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1 before this module
is imported), for tests without a GPU.

A column of the logits belongs to a row of the output layer's weight. A token's `column` is the
local index of its target, or -1 if another rank holds it.

Shape suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block,
D hidden width, K runs; inside the kernels T tokens and R rows of a program's tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_agentrl.actor.vocab.partial_softmax import (
    MAX,
    TARGET,
    LogitGradCoefficients,
    empty_stats,
    merge_stats,
)
from mega_agentrl.actor.vocab.tiling import accumulate_gradients, split_range
from mega_agentrl.reshard.layout import round_up

MAX_CHUNK_TOKENS = 8192
# A chunk has as many tokens as leave the backward scratch this many rows wide.
MIN_BLOCK_ROWS = 16384
# Token blocks that go through the vocabulary together; the fastest on an H100 of 8 and 16.
STATS_GROUP = 16
GRADIENT_GROUP = 8
DESCRIPTOR_ALIGNMENT = 16
"""Bytes that the start and the rows of a tensor behind a descriptor must be aligned to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Tile sizes and compile options of the kernels."""

    block_tokens: int
    block_rows: int
    """Vocabulary rows of a block."""
    block_hidden: int
    """Step of the product over the hidden width."""
    blocks_per_run: int
    """Vocabulary blocks that one program of the forward kernel processes."""
    num_warps: int
    num_stages: int


# 192 KiB of operands in flight and the registers of two warp groups.
HOPPER_TILE = TileConfig(
    block_tokens=128, block_rows=256, block_hidden=64, blocks_per_run=8, num_warps=8, num_stages=4
)
# 144 KiB in flight, for A100. Not run on one.
AMPERE_TILE = replace(HOPPER_TILE, num_stages=3)
# For GPUs with less shared memory.
SMALL_SMEM_TILE = TileConfig(
    block_tokens=128, block_rows=128, block_hidden=32, blocks_per_run=16, num_warps=8, num_stages=3
)
FLOAT32_TILE = TileConfig(
    block_tokens=64, block_rows=64, block_hidden=32, blocks_per_run=16, num_warps=4, num_stages=2
)
# Small, so that small inputs have several blocks, runs and edges.
INTERPRETER_TILE = TileConfig(
    block_tokens=16, block_rows=16, block_hidden=16, blocks_per_run=2, num_warps=1, num_stages=1
)


def chunk_tokens(hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> int:
    """Return how many tokens to process at once so that a wide scratch fits into `num_bytes`."""
    width = max(1, min(num_rows, MIN_BLOCK_ROWS))
    return max(1, min(MAX_CHUNK_TOKENS, num_bytes // (width * hidden_ND.dtype.itemsize)))


def local_stats(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    column_C: torch.Tensor,
    temperature: float,
    num_bytes: int,
) -> torch.Tensor:
    """Compute the `[4, C]` float64 statistics of the logits at the rows of `weight_VD`.

    The arguments are those of `torch_kernel.local_stats`; `num_bytes` is not used, because no
    logits are stored.
    """
    num_tokens, num_rows = len(hidden_CD), len(weight_VD)
    if not num_rows or not num_tokens:
        return empty_stats(num_tokens, hidden_CD.device)
    tile = _select_tile(hidden_CD)
    num_runs = triton.cdiv(num_rows, tile.block_rows * tile.blocks_per_run)
    stats_K4C = hidden_CD.new_empty(num_runs, 4, num_tokens, dtype=torch.float32)
    with torch.cuda.device_of(hidden_CD):
        _stats_kernel[(triton.cdiv(num_tokens, tile.block_tokens) * num_runs,)](
            *_describe_inputs(_align_rows(hidden_CD), _align_rows(weight_VD), tile),
            column_C.to(torch.int32),
            stats_K4C,
            num_tokens,
            num_rows,
            1.0 / temperature,
            RUN=tile.blocks_per_run,
            GROUP=STATS_GROUP,
            **_kernel_constants(tile, hidden_CD),
        )
    stats_K4C = stats_K4C.double()
    stats_K4C[:, [MAX, TARGET]] /= temperature
    return merge_stats(stats_K4C)


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    column_N: torch.Tensor,
    coefficients: LogitGradCoefficients,
    temperature: float,
    num_bytes: int,
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Compute the gradients of the hidden states and of the rows of `weight_VD`.

    The arguments are those of `torch_kernel.gradients`; `num_bytes` bounds the scratch, but for
    the alignment of its rows.
    """
    num_tokens, num_rows = len(hidden_ND), len(weight_VD)
    step = min(num_tokens, chunk_tokens(hidden_ND, num_rows, num_bytes))
    width = max(1, num_bytes // (step * hidden_ND.dtype.itemsize))
    # A multiple of `MIN_BLOCK_ROWS`, unless that is more than fits.
    width = min(num_rows, width - width % MIN_BLOCK_ROWS or width)
    column_N = column_N.to(torch.int32)
    aligned_hidden, aligned_weight = _align_rows(hidden_ND), _align_rows(weight_VD)
    pitch = round_up(width, DESCRIPTOR_ALIGNMENT // hidden_ND.dtype.itemsize)
    scratch_CB = hidden_ND.new_empty(step, pitch)

    def tile_gradient(tokens: slice, rows: slice) -> torch.Tensor:
        grad_CB = scratch_CB[: tokens.stop - tokens.start, : rows.stop - rows.start]
        _launch_gradient(
            grad_CB,
            aligned_hidden[tokens],
            aligned_weight[rows],
            column_N[tokens] - rows.start,
            coefficients.slice_tokens(tokens),
            temperature,
        )
        return grad_CB

    chunks, blocks = list(split_range(num_tokens, step)), list(split_range(num_rows, max(1, width)))
    accumulate_gradients(
        hidden_ND, weight_VD, tile_gradient, chunks, blocks, grad_hidden_ND, grad_weight_VD
    )


def _launch_gradient(
    grad_CB: torch.Tensor,
    hidden_CD: torch.Tensor,
    weight_BD: torch.Tensor,
    column_C: torch.Tensor,
    coefficients: LogitGradCoefficients,
    temperature: float,
) -> None:
    tile = _select_tile(hidden_CD)
    num_tokens, num_rows = grad_CB.shape
    grid = (triton.cdiv(num_tokens, tile.block_tokens) * triton.cdiv(num_rows, tile.block_rows),)
    with torch.cuda.device_of(hidden_CD):
        _gradient_kernel[grid](
            *_describe_inputs(hidden_CD, weight_BD, tile),
            column_C,
            coefficients.max_raw_logit_N,
            coefficients.prob_coef_N,
            # Without entropy the kernel needs a pointer but does not read it.
            coefficients.prob_coef_N
            if coefficients.entropy_coef_N is None
            else coefficients.entropy_coef_N,
            coefficients.target_coef_N,
            _describe(grad_CB, tile.block_tokens, tile.block_rows),
            num_tokens,
            num_rows,
            1.0 / temperature,
            WITH_ENTROPY=coefficients.entropy_coef_N is not None,
            GROUP=GRADIENT_GROUP,
            **_kernel_constants(tile, hidden_CD),
        )


def _align_rows(value_ND: torch.Tensor) -> torch.Tensor:
    """Return `[N, D]` contiguous values that a descriptor can be made of, padded with 0 in D."""
    padding = -value_ND.size(1) % (DESCRIPTOR_ALIGNMENT // value_ND.dtype.itemsize)
    if padding:
        value_ND = functional.pad(value_ND, (0, padding))
    is_aligned = value_ND.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
    return value_ND.contiguous() if is_aligned else value_ND.clone()


def _describe_inputs(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, tile: TileConfig
) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        _describe(hidden_CD, tile.block_tokens, tile.block_hidden),
        _describe(weight_VD, tile.block_rows, tile.block_hidden),
    )


def _describe(value: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Return a descriptor of a matrix for tiles of this size."""
    return TensorDescriptor.from_tensor(value, [num_rows, num_columns])


def _select_tile(hidden_ND: torch.Tensor) -> TileConfig:
    if not hidden_ND.is_cuda:
        return INTERPRETER_TILE
    if hidden_ND.dtype == torch.float32:
        return FLOAT32_TILE
    properties = torch.cuda.get_device_properties(hidden_ND.device)
    num_kib = properties.shared_memory_per_block_optin >> 10
    if num_kib >= 200:
        return HOPPER_TILE
    return AMPERE_TILE if num_kib >= 160 else SMALL_SMEM_TILE


def _kernel_constants(tile: TileConfig, hidden_CD: torch.Tensor) -> dict[str, Any]:
    return {
        "HIDDEN": hidden_CD.size(1),
        "TOKENS": tile.block_tokens,
        "ROWS": tile.block_rows,
        "STEP": tile.block_hidden,
        # The interpreter's product misreads bfloat16 as integers; float32 gives the same result.
        "WIDEN": not hidden_CD.is_cuda,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit
def _program_indices(
    num_token_blocks: tl.tensor, num_row_parts: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return this program's token block and its part of the rows, a run or a vocabulary block.

    Consecutive programs process the same part for a group of GROUP token blocks.
    """
    program = tl.program_id(0)
    programs_per_group = GROUP * num_row_parts
    first_block = program // programs_per_group * GROUP
    group_size = tl.minimum(num_token_blocks - first_block, GROUP)
    index_in_group = program % programs_per_group
    return first_block + index_in_group % group_size, index_in_group // group_size


@triton.jit
def _raw_logits(
    hidden_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    first_token: tl.tensor,
    first_row: tl.tensor,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Return `[TOKENS, ROWS]` float32 logits; 0 for tokens and rows beyond the last."""
    raw_TR = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in range(0, HIDDEN, STEP):
        left_TS = hidden_desc.load([first_token, start])
        right_RS = weight_desc.load([first_row, start])
        if WIDEN:
            left_TS = left_TS.to(tl.float32)
            right_RS = right_RS.to(tl.float32)
        raw_TR = tl.dot(left_TS, right_RS.T, raw_TR, input_precision="ieee")
    return raw_TR


@triton.jit
def _stats_kernel(
    hidden_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    column_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    inverse_temperature: tl.tensor,
    RUN: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Write the `[4, T]` statistics of one token block over one run of vocabulary blocks."""
    num_blocks = tl.cdiv(num_rows, ROWS)
    token_block, run = _program_indices(
        tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_blocks, RUN), GROUP
    )
    token_T = tl.arange(0, TOKENS)
    num_remaining = num_tokens - token_block * TOKENS
    column_T = tl.load(column_ptr + token_block * TOKENS + tl.minimum(token_T, num_remaining - 1))
    # Finite, because the shift from -inf to a maximum of -inf would be NaN.
    max_T = tl.full((TOKENS,), -1e38, dtype=tl.float32)
    sum_T = tl.zeros((TOKENS,), dtype=tl.float32)
    weighted_T = tl.zeros((TOKENS,), dtype=tl.float32)
    target_T = tl.full((TOKENS,), float("-inf"), dtype=tl.float32)
    for block in range(run * RUN, tl.minimum((run + 1) * RUN, num_blocks)):
        start = block * ROWS
        row_R = tl.arange(0, ROWS)
        is_row_1R = (row_R < num_rows - start)[None, :]
        raw_TR = _raw_logits(
            hidden_desc,
            weight_desc,
            token_block * TOKENS,
            start,
            HIDDEN,
            TOKENS,
            ROWS,
            STEP,
            WIDEN,
        )
        is_target_TR = (start + row_R)[None, :] == column_T[:, None]
        target_T = tl.maximum(
            target_T, tl.max(tl.where(is_target_TR, raw_TR, float("-inf")), axis=1)
        )
        new_max_T = tl.maximum(max_T, tl.max(tl.where(is_row_1R, raw_TR, -1e38), axis=1))
        x_TR = (raw_TR - new_max_T[:, None]) * inverse_temperature
        exp_TR = tl.where(is_row_1R, tl.exp(x_TR), 0.0)
        shift_T = (max_T - new_max_T) * inverse_temperature
        scale_T = tl.exp(shift_T)
        weighted_T = scale_T * (weighted_T + tl.maximum(shift_T, -1000.0) * sum_T)
        weighted_T += tl.sum(exp_TR * x_TR, axis=1)
        sum_T = scale_T * sum_T + tl.sum(exp_TR, axis=1)
        max_T = new_max_T
    stats_T = stats_ptr + (run * 4).to(tl.int64) * num_tokens + token_block * TOKENS + token_T
    inside_T = token_T < num_remaining
    tl.store(stats_T, max_T, mask=inside_T)
    tl.store(stats_T + num_tokens, sum_T, mask=inside_T)
    tl.store(stats_T + 2 * num_tokens, weighted_T, mask=inside_T)
    tl.store(stats_T + 3 * num_tokens, target_T, mask=inside_T)


@triton.jit
def _gradient_kernel(
    hidden_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    column_ptr: tl.tensor,
    max_logit_ptr: tl.tensor,
    prob_coef_ptr: tl.tensor,
    entropy_coef_ptr: tl.tensor,
    target_coef_ptr: tl.tensor,
    grad_desc: tl.tensor_descriptor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    inverse_temperature: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Write the gradient of the raw logits of one token block at one vocabulary block."""
    token_block, row_block = _program_indices(
        tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS), GROUP
    )
    first_token = token_block * TOKENS
    first_row = row_block * ROWS
    raw_TR = _raw_logits(
        hidden_desc,
        weight_desc,
        first_token,
        first_row,
        HIDDEN,
        TOKENS,
        ROWS,
        STEP,
        WIDEN,
    )
    token_T = tl.minimum(first_token + tl.arange(0, TOKENS), num_tokens - 1)
    row_R = first_row + tl.arange(0, ROWS)
    max_logit_T = tl.load(max_logit_ptr + token_T)
    prob_coef_T1 = tl.load(prob_coef_ptr + token_T)[:, None]
    x_TR = (raw_TR - max_logit_T[:, None]) * inverse_temperature
    if WITH_ENTROPY:
        entropy_coef_T1 = tl.load(entropy_coef_ptr + token_T)[:, None]
        prob_grad_TR = tl.exp(x_TR) * (prob_coef_T1 + entropy_coef_T1 * x_TR)
    else:
        prob_grad_TR = tl.exp(x_TR) * prob_coef_T1
    column_T = tl.load(column_ptr + token_T)
    is_target_TR = row_R[None, :] == column_T[:, None]
    target_coef_T = tl.load(target_coef_ptr + token_T)
    grad_TR = tl.where(is_target_TR, target_coef_T[:, None], 0.0) - prob_grad_TR
    grad_desc.store([first_token, first_row], grad_TR.to(grad_desc.dtype))
