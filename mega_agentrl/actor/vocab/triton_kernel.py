"""Statistics and gradients of one rank's vocabulary columns, with Triton kernels for GPUs.

Forward: a program processes a block of tokens against a run of vocabulary blocks. The logits of
a block stay in registers and are merged into the running statistics of the tokens (online
softmax), so only four numbers per token and run are written. Backward: the same product is
computed again, turned into the gradient of the logits in registers and written once, in the
dtype of the inputs, to a bounded `[C, B]` scratch, which torch's matrix product then multiplies
into both gradients.

Inputs are float32, bfloat16 or float16; products are summed in float32 (for float32 inputs
without TF32). Concurrent programs share token and vocabulary blocks through the L2 cache: groups of
16 token blocks go through the vocabulary together. On a CPU the kernels run under Triton's
interpreter (TRITON_INTERPRET=1 before this module is imported), for tests without a GPU.

A column of the logits belongs to a row of the output layer's weight. A token's `column` is the
local index of its target, or -1 if another rank holds it.

Shape suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block,
D hidden width, K runs; inside the kernels T tokens and R rows of a program's tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mega_agentrl.actor.vocab.partial_softmax import (
    MAX,
    TARGET,
    LogitGradCoefficients,
    empty_stats,
    merge_stats,
)
from mega_agentrl.actor.vocab.tiling import accumulate_gradients, split_range

MAX_CHUNK_TOKENS = 8192
# A chunk has as many tokens as leave the backward scratch this many rows wide.
MIN_BLOCK_ROWS = 16384
L2_GROUP_TOKEN_BLOCKS = 16


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


# 144 KiB of operands in flight and the registers of two warp groups: for Hopper and A100.
HOPPER_TILE = TileConfig(
    block_tokens=128, block_rows=256, block_hidden=64, blocks_per_run=8, num_warps=8, num_stages=3
)
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
            hidden_CD.contiguous(),
            weight_VD.contiguous(),
            column_C.to(torch.int32),
            stats_K4C,
            num_tokens,
            num_rows,
            1.0 / temperature,
            RUN=tile.blocks_per_run,
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

    The arguments are those of `torch_kernel.gradients`; `num_bytes` bounds the scratch.
    """
    num_tokens, num_rows = len(hidden_ND), len(weight_VD)
    step = min(num_tokens, chunk_tokens(hidden_ND, num_rows, num_bytes))
    width = max(1, num_bytes // (step * hidden_ND.dtype.itemsize))
    # A multiple of `MIN_BLOCK_ROWS`, unless that is more than fits.
    width = min(num_rows, width - width % MIN_BLOCK_ROWS or width)
    hidden_ND, weight_VD = hidden_ND.contiguous(), weight_VD.contiguous()
    column_N = column_N.to(torch.int32)
    scratch = hidden_ND.new_empty(step * width)

    def tile_gradient(tokens: slice, rows: slice) -> torch.Tensor:
        shape = (tokens.stop - tokens.start, rows.stop - rows.start)
        grad_CB = scratch[: shape[0] * shape[1]].view(shape)
        _launch_gradient(
            grad_CB,
            hidden_ND[tokens],
            weight_VD[rows],
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
            hidden_CD,
            weight_BD,
            column_C,
            coefficients.max_raw_logit_N,
            coefficients.prob_coef_N,
            # Without entropy the kernel needs a pointer but does not read it.
            coefficients.prob_coef_N
            if coefficients.entropy_coef_N is None
            else coefficients.entropy_coef_N,
            coefficients.target_coef_N,
            grad_CB,
            num_tokens,
            num_rows,
            1.0 / temperature,
            WITH_ENTROPY=coefficients.entropy_coef_N is not None,
            **_kernel_constants(tile, hidden_CD),
        )


def _select_tile(hidden_ND: torch.Tensor) -> TileConfig:
    if not hidden_ND.is_cuda:
        return INTERPRETER_TILE
    if hidden_ND.dtype == torch.float32:
        return FLOAT32_TILE
    properties = torch.cuda.get_device_properties(hidden_ND.device)
    return HOPPER_TILE if properties.shared_memory_per_block_optin >= 160 << 10 else SMALL_SMEM_TILE


def _kernel_constants(tile: TileConfig, hidden_CD: torch.Tensor) -> dict[str, Any]:
    hidden_size = hidden_CD.size(1)
    return {
        "HIDDEN": hidden_size,
        "TOKENS": tile.block_tokens,
        "ROWS": tile.block_rows,
        "STEP": tile.block_hidden,
        # Whether the steps divide the hidden width, so that its loads need no mask.
        "EVEN": hidden_size % tile.block_hidden == 0,
        # The interpreter's product misreads bfloat16 as integers; float32 gives the same result.
        "WIDEN": not hidden_CD.is_cuda,
        "GROUP": L2_GROUP_TOKEN_BLOCKS,
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
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    token_T: tl.tensor,
    row_R: tl.tensor,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Return `[TOKENS, ROWS]` float32 logits; tokens and rows are relative to the pointers."""
    step_S = tl.arange(0, STEP)
    hidden_TS = hidden_ptr + token_T[:, None] * HIDDEN + step_S[None, :]
    weight_SR = weight_ptr + row_R[None, :] * HIDDEN + step_S[:, None]
    raw_TR = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in range(0, HIDDEN, STEP):
        if EVEN:
            left_TS = tl.load(hidden_TS)
            right_SR = tl.load(weight_SR)
        else:
            inside_S = step_S < HIDDEN - start
            left_TS = tl.load(hidden_TS, mask=inside_S[None, :], other=0.0)
            right_SR = tl.load(weight_SR, mask=inside_S[:, None], other=0.0)
        if WIDEN:
            left_TS = left_TS.to(tl.float32)
            right_SR = right_SR.to(tl.float32)
        raw_TR = tl.dot(left_TS, right_SR, raw_TR, input_precision="ieee")
        hidden_TS += STEP
        weight_SR += STEP
    return raw_TR


@triton.jit
def _stats_kernel(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    EVEN: tl.constexpr,
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
    # The last blocks repeat their last token and row instead of masking every load.
    clamped_T = tl.minimum(token_T, num_remaining - 1)
    hidden_ptr += token_block.to(tl.int64) * TOKENS * HIDDEN
    column_T = tl.load(column_ptr + token_block * TOKENS + clamped_T)
    # Finite, because the shift from -inf to a maximum of -inf would be NaN.
    max_T = tl.full((TOKENS,), -1e38, dtype=tl.float32)
    sum_T = tl.zeros((TOKENS,), dtype=tl.float32)
    weighted_T = tl.zeros((TOKENS,), dtype=tl.float32)
    target_T = tl.full((TOKENS,), float("-inf"), dtype=tl.float32)
    for block in range(run * RUN, tl.minimum((run + 1) * RUN, num_blocks)):
        start = block * ROWS
        row_R = tl.arange(0, ROWS)
        clamped_R = tl.minimum(row_R, num_rows - start - 1)
        raw_TR = _raw_logits(
            hidden_ptr,
            weight_ptr + start.to(tl.int64) * HIDDEN,
            clamped_T,
            clamped_R,
            HIDDEN,
            TOKENS,
            ROWS,
            STEP,
            EVEN,
            WIDEN,
        )
        is_target_TR = (start + row_R)[None, :] == column_T[:, None]
        target_T = tl.maximum(
            target_T, tl.max(tl.where(is_target_TR, raw_TR, float("-inf")), axis=1)
        )
        # Repeated rows do not change the maximum.
        new_max_T = tl.maximum(max_T, tl.max(raw_TR, axis=1))
        x_TR = (raw_TR - new_max_T[:, None]) * inverse_temperature
        exp_TR = tl.where((row_R < num_rows - start)[None, :], tl.exp(x_TR), 0.0)
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
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    column_ptr: tl.tensor,
    max_logit_ptr: tl.tensor,
    prob_coef_ptr: tl.tensor,
    entropy_coef_ptr: tl.tensor,
    target_coef_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    inverse_temperature: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Write the gradient of the raw logits of one token block at one vocabulary block."""
    token_block, row_block = _program_indices(
        tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS), GROUP
    )
    token_T = tl.arange(0, TOKENS)
    row_R = tl.arange(0, ROWS)
    first_token = token_block * TOKENS
    first_row = row_block * ROWS
    clamped_T = tl.minimum(token_T, num_tokens - first_token - 1)
    clamped_R = tl.minimum(row_R, num_rows - first_row - 1)
    raw_TR = _raw_logits(
        hidden_ptr + first_token.to(tl.int64) * HIDDEN,
        weight_ptr + first_row.to(tl.int64) * HIDDEN,
        clamped_T,
        clamped_R,
        HIDDEN,
        TOKENS,
        ROWS,
        STEP,
        EVEN,
        WIDEN,
    )
    token_T = first_token + clamped_T
    max_logit_T = tl.load(max_logit_ptr + token_T)
    prob_coef_T1 = tl.load(prob_coef_ptr + token_T)[:, None]
    x_TR = (raw_TR - max_logit_T[:, None]) * inverse_temperature
    if WITH_ENTROPY:
        entropy_coef_T1 = tl.load(entropy_coef_ptr + token_T)[:, None]
        prob_grad_TR = tl.exp(x_TR) * (prob_coef_T1 + entropy_coef_T1 * x_TR)
    else:
        prob_grad_TR = tl.exp(x_TR) * prob_coef_T1
    column_T = tl.load(column_ptr + token_T)
    is_target_TR = (first_row + row_R)[None, :] == column_T[:, None]
    target_coef_T = tl.load(target_coef_ptr + token_T)
    grad_TR = tl.where(is_target_TR, target_coef_T[:, None], 0.0) - prob_grad_TR
    inside_TR = (first_token + tl.arange(0, TOKENS) < num_tokens)[:, None]
    inside_TR &= (first_row + row_R < num_rows)[None, :]
    offset_TR = (first_token + tl.arange(0, TOKENS)).to(tl.int64)[:, None] * num_rows
    offset_TR += (first_row + row_R)[None, :]
    tl.store(grad_ptr + offset_TR, grad_TR.to(grad_ptr.dtype.element_ty), mask=inside_TR)
