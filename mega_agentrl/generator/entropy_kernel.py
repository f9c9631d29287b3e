"""The entropy tap's measurements of a step's logits in one pass, with a Triton kernel for GPUs.

A program reads the logits of a row once and keeps for each of its lanes the largest logit m, its
token, and the sums of e and e x over the lane's tokens, with x = (l - m) / T and e = exp(x). When a
lane meets a larger logit, both sums are rescaled. The lanes are merged alike at the end, and with
the sums s and w of the row

    log p_y = (l_y - m) / T - log s
    H = log s - w / s

Nothing of the size of the logits is stored. On a CPU the kernel runs under Triton's interpreter
(TRITON_INTERPRET=1 before this module is imported), for tests without a GPU.

Shape suffixes: R rows, V tokens of the vocabulary, S request slots, B lanes of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mega_agentrl.generator.entropy_tap import MIN_TEMPERATURE

BLOCK, NUM_WARPS = 8192, 16
_GREEDY_BELOW = tl.constexpr(MIN_TEMPERATURE)
_LOWEST = tl.constexpr(-1e30)
"""Maximum of a lane without tokens, below all logits; finite, because inf - inf is not a number."""


def measure_sampled(
    logits_RV: torch.Tensor,
    sampled_R: torch.Tensor,
    temperature_S: torch.Tensor,
    slot_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure the rows of a step, in which a token was sampled from each.

    Args:
        logits_RV: Raw logits of any floating-point dtype, adjacent within a row.
        sampled_R: `[R]` int64 ids of the sampled tokens; any stride.
        temperature_S: `[S]` float32 temperature of each request slot; a greedy one counts as 1.
        slot_R: `[R]` integer slot of each row.

    Returns:
        `[R]` int64 bits of the float32 pairs (log p_y, -H), whose sign is always set, and `[R]`
        int64 ids of the most probable tokens, the first of equal ones.
    """
    num_rows, num_tokens = logits_RV.shape
    bits_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    argmax_R = torch.empty_like(bits_R)
    if num_rows:
        _measure_kernel[(num_rows,)](
            logits_RV,
            logits_RV.stride(0),
            sampled_R,
            sampled_R.stride(0),
            temperature_S,
            slot_R,
            bits_R,
            argmax_R,
            num_tokens,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return bits_R, argmax_R


@triton.jit  # type: ignore[untyped-decorator]
def _measure_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    sampled_ptr: tl.tensor,
    sampled_stride: tl.tensor,
    temperature_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    argmax_ptr: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + tl.load(slot_ptr + row))
    inverse = tl.where(temperature < _GREEDY_BELOW, 1.0, 1.0 / temperature)
    max_B = tl.full([BLOCK], _LOWEST, tl.float32)
    argmax_B = tl.zeros([BLOCK], tl.int32)
    sum_B = tl.zeros([BLOCK], tl.float32)
    weighted_B = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_tokens, BLOCK):
        token_B = first + tl.arange(0, BLOCK)
        logit_B = tl.load(row_ptr + token_B, mask=token_B < num_tokens, other=float("-inf"))
        logit_B = logit_B.to(tl.float32)
        argmax_B = tl.where(logit_B > max_B, token_B, argmax_B)
        new_max_B = tl.maximum(max_B, logit_B)
        step_B = (max_B - new_max_B) * inverse
        scale_B = tl.exp(step_B)
        x_B = (logit_B - new_max_B) * inverse
        e_B = tl.exp(x_B)
        weighted_B = scale_B * (weighted_B + step_B * sum_B) + tl.where(e_B > 0, e_B * x_B, 0.0)
        sum_B = scale_B * sum_B + e_B
        max_B = new_max_B
    largest = tl.max(max_B, axis=0)
    argmax = tl.min(tl.where(max_B == largest, argmax_B, num_tokens), axis=0)
    step_B = (max_B - largest) * inverse
    scale_B = tl.exp(step_B)
    total = tl.sum(scale_B * sum_B, axis=0)
    weighted = tl.sum(scale_B * (weighted_B + step_B * sum_B), axis=0)
    log_total = tl.log(total)
    # Rounding may leave an entropy of 0 slightly below it.
    entropy = tl.maximum(log_total - weighted / total, 0.0)
    sampled = tl.load(row_ptr + tl.load(sampled_ptr + row * sampled_stride)).to(tl.float32)
    logp = (sampled - largest) * inverse - log_total
    high = entropy.to(tl.uint32, bitcast=True).to(tl.uint64) | 0x80000000
    bits = (high << 32) | logp.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.store(bits_ptr + row, bits.to(tl.int64, bitcast=True))
    tl.store(argmax_ptr + row, argmax.to(tl.int64))
