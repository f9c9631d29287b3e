"""Statistics and gradients of one rank's vocabulary columns, with Triton kernels for GPUs.

Forward: a program takes a block of tokens through a run of vocabulary blocks; each block's
logits live in registers only and are folded into the running statistics of the tokens (online
softmax), so memory sees four numbers a token and run. Backward: the same product again, turned
into the gradient of the logits in registers and written once, in the inputs' own type, into a
bounded [C, B] scratch, which the vendor's matrix product then multiplies into both gradients.

Float32, bfloat16 and float16 inputs, products summed in float32 (float32 inputs without TF32).
Programs of one wave share token blocks and vocabulary blocks through the L2 cache: 16 token
blocks go side by side through the vocabulary. Runs on a CPU under Triton's interpreter
(TRITON_INTERPRET=1 before this module is imported), which is how it is tested without a GPU.

Knows no groups: columns are this rank's, -1 where a token's target is not here.

Suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block, D hidden,
K runs; inside the kernels T tokens and R rows of a program's tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mega_agentrl.actor.vocab_softmax import MAX, TARGET, Slopes, merge, no_columns
from mega_agentrl.actor.vocab_tiles import cut, sum_gradients

MAX_CHUNK_TOKENS = 8192
# The backward scratch is at least so many rows wide before chunks get longer.
MIN_BLOCK_ROWS = 16384
SIDE_BY_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sizes of a program's tile, vocabulary blocks of a run, and how it is compiled."""

    tokens: int
    rows: int
    hidden: int
    run: int
    warps: int
    stages: int


# 144 KiB of operands in flight, two warp groups' worth of registers: Hopper, and A100.
HOPPER = Tile(tokens=128, rows=256, hidden=64, run=8, warps=8, stages=3)
# For cards with less shared memory.
SMALL = Tile(tokens=128, rows=128, hidden=32, run=16, warps=8, stages=3)
FLOAT32 = Tile(tokens=64, rows=64, hidden=32, run=16, warps=4, stages=2)
# Small, so that small inputs have several blocks, runs and edges.
INTERPRETED = Tile(tokens=16, rows=16, hidden=16, run=2, warps=1, stages=1)


def chunk_tokens(hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> int:
    """Tokens computed at once, so that a scratch of useful width fits into `num_bytes`."""
    width = max(1, min(num_rows, MIN_BLOCK_ROWS))
    return max(1, min(MAX_CHUNK_TOKENS, num_bytes // (width * hidden_ND.dtype.itemsize)))


def local_stats(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    column_C: torch.Tensor,
    temperature: float,
    num_bytes: int,
) -> torch.Tensor:
    """[4, C] float64 statistics (see `vocab_softmax`) of the columns of `weight_VD`.

    column_C: [C] int64, row of `weight_VD` that is the target, -1 where none is. num_bytes is
    for the interface's sake: no logits are stored.
    """
    num_tokens, num_rows = len(hidden_CD), len(weight_VD)
    if not num_rows or not num_tokens:
        return no_columns(num_tokens, hidden_CD.device)
    tile = _tile(hidden_CD)
    runs = triton.cdiv(num_rows, tile.rows * tile.run)
    stats_K4C = hidden_CD.new_empty(runs, 4, num_tokens, dtype=torch.float32)
    with torch.cuda.device_of(hidden_CD):
        _stats_kernel[(triton.cdiv(num_tokens, tile.tokens) * runs,)](
            hidden_CD.contiguous(),
            weight_VD.contiguous(),
            column_C.to(torch.int32),
            stats_K4C,
            num_tokens,
            num_rows,
            1.0 / temperature,
            RUN=tile.run,
            **_constants(tile, hidden_CD),
        )
    stats_K4C = stats_K4C.double()
    stats_K4C[:, [MAX, TARGET]] /= temperature
    return merge(stats_K4C)


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    column_N: torch.Tensor,
    slopes: Slopes,
    temperature: float,
    num_bytes: int,
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Gradients through these columns; the last two arguments are `sum_gradients`'s."""
    num_tokens, num_rows = len(hidden_ND), len(weight_VD)
    step = min(num_tokens, chunk_tokens(hidden_ND, num_rows, num_bytes))
    width = max(1, num_bytes // (step * hidden_ND.dtype.itemsize))
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
            slopes.part(tokens),
            temperature,
        )
        return grad_CB

    chunks, blocks = list(cut(num_tokens, step)), list(cut(num_rows, max(1, width)))
    sum_gradients(
        hidden_ND, weight_VD, tile_gradient, chunks, blocks, grad_hidden_ND, grad_weight_VD
    )


def _launch_gradient(
    grad_CB: torch.Tensor,
    hidden_CD: torch.Tensor,
    weight_BD: torch.Tensor,
    column_C: torch.Tensor,
    slopes: Slopes,
    temperature: float,
) -> None:
    tile = _tile(hidden_CD)
    num_tokens, num_rows = grad_CB.shape
    grid = (triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows),)
    with torch.cuda.device_of(hidden_CD):
        _gradient_kernel[grid](
            hidden_CD,
            weight_BD,
            column_C,
            slopes.center_N,
            slopes.constant_N,
            slopes.constant_N if slopes.slope_N is None else slopes.slope_N,
            slopes.target_N,
            grad_CB,
            num_tokens,
            num_rows,
            1.0 / temperature,
            WITH_ENTROPY=slopes.slope_N is not None,
            **_constants(tile, hidden_CD),
        )


def _tile(hidden_ND: torch.Tensor) -> Tile:
    if not hidden_ND.is_cuda:
        return INTERPRETED
    if hidden_ND.dtype == torch.float32:
        return FLOAT32
    properties = torch.cuda.get_device_properties(hidden_ND.device)
    return HOPPER if properties.shared_memory_per_block_optin >= 160 << 10 else SMALL


def _constants(tile: Tile, hidden_CD: torch.Tensor) -> dict[str, Any]:
    hidden = hidden_CD.size(1)
    return {
        "HIDDEN": hidden,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "STEP": tile.hidden,
        "EVEN": hidden % tile.hidden == 0,
        # The interpreter's product takes bfloat16 for integers; in float32 it is as exact.
        "WIDEN": not hidden_CD.is_cuda,
        "GROUP": SIDE_BY_SIDE,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def _place(
    num_token_blocks: tl.tensor, num_others: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Token block and other index of this program: GROUP token blocks go side by side."""
    program = tl.program_id(0)
    per_group = GROUP * num_others
    first = program // per_group * GROUP
    size = tl.minimum(num_token_blocks - first, GROUP)
    within = program % per_group
    return first + within % size, within // size


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
    """[TOKENS, ROWS] float32 products; the pointers are the tile's, tokens and rows within it."""
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
    """stats [K, 4, C] of one token block over one run of vocabulary blocks."""
    num_blocks = tl.cdiv(num_rows, ROWS)
    token_block, run = _place(tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_blocks, RUN), GROUP)
    token_T = tl.arange(0, TOKENS)
    left = num_tokens - token_block * TOKENS
    # The last blocks repeat their last token and row instead of masking every load.
    near_T = tl.minimum(token_T, left - 1)
    hidden_ptr += token_block.to(tl.int64) * TOKENS * HIDDEN
    column_T = tl.load(column_ptr + token_block * TOKENS + near_T)
    # Finite, so that the first block's shift by the maximum is no inf - inf.
    max_T = tl.full((TOKENS,), -1e38, dtype=tl.float32)
    sum_T = tl.zeros((TOKENS,), dtype=tl.float32)
    weighted_T = tl.zeros((TOKENS,), dtype=tl.float32)
    target_T = tl.full((TOKENS,), float("-inf"), dtype=tl.float32)
    for block in range(run * RUN, tl.minimum((run + 1) * RUN, num_blocks)):
        start = block * ROWS
        row_R = tl.arange(0, ROWS)
        near_R = tl.minimum(row_R, num_rows - start - 1)
        raw_TR = _raw_logits(
            hidden_ptr,
            weight_ptr + start.to(tl.int64) * HIDDEN,
            near_T,
            near_R,
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
        # Repeated rows cannot move the maximum.
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
    inside_T = token_T < left
    tl.store(stats_T, max_T, mask=inside_T)
    tl.store(stats_T + num_tokens, sum_T, mask=inside_T)
    tl.store(stats_T + 2 * num_tokens, weighted_T, mask=inside_T)
    tl.store(stats_T + 3 * num_tokens, target_T, mask=inside_T)


@triton.jit
def _gradient_kernel(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    column_ptr: tl.tensor,
    center_ptr: tl.tensor,
    constant_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    target_ptr: tl.tensor,
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
    """grad [C, B]: gradient of the raw logits of one token block at one vocabulary block."""
    token_block, row_block = _place(tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS), GROUP)
    token_T = tl.arange(0, TOKENS)
    row_R = tl.arange(0, ROWS)
    first_token = token_block * TOKENS
    first_row = row_block * ROWS
    near_T = tl.minimum(token_T, num_tokens - first_token - 1)
    near_R = tl.minimum(row_R, num_rows - first_row - 1)
    raw_TR = _raw_logits(
        hidden_ptr + first_token.to(tl.int64) * HIDDEN,
        weight_ptr + first_row.to(tl.int64) * HIDDEN,
        near_T,
        near_R,
        HIDDEN,
        TOKENS,
        ROWS,
        STEP,
        EVEN,
        WIDEN,
    )
    token_T = first_token + near_T
    center_T = tl.load(center_ptr + token_T)
    pull_T1 = tl.load(constant_ptr + token_T)[:, None]
    x_TR = (raw_TR - center_T[:, None]) * inverse_temperature
    if WITH_ENTROPY:
        pull_TR = tl.exp(x_TR) * (pull_T1 + tl.load(slope_ptr + token_T)[:, None] * x_TR)
    else:
        pull_TR = tl.exp(x_TR) * pull_T1
    column_T = tl.load(column_ptr + token_T)
    is_target_TR = (first_row + row_R)[None, :] == column_T[:, None]
    target_T = tl.load(target_ptr + token_T)
    grad_TR = tl.where(is_target_TR, target_T[:, None], 0.0) - pull_TR
    inside_TR = (first_token + tl.arange(0, TOKENS) < num_tokens)[:, None]
    inside_TR &= (first_row + row_R < num_rows)[None, :]
    place_TR = (first_token + tl.arange(0, TOKENS)).to(tl.int64)[:, None] * num_rows
    place_TR += (first_row + row_R)[None, :]
    tl.store(grad_ptr + place_TR, grad_TR.to(grad_ptr.dtype.element_ty), mask=inside_TR)
