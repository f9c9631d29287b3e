"""Token log-prob and exact entropy from hidden states, with a vocabulary-parallel output layer.

The output layer and its softmax are one differentiable function that never materialises an
`[N, V/tp]` tensor. Tokens are processed in chunks whose size follows from a bound on scratch
bytes. For each chunk a rank keeps four numbers per token (`vocab.partial_softmax` has the
maths), and one all-gather per chunk combines them while the next chunk is computed. The backward
pass recomputes the logits and sums the gradient of the hidden states over the ranks: with an
all-reduce, or with a reduce-scatter under sequence parallelism, where each rank needs the rows of
its own tokens.

There are two kernels with one interface, `torch_kernel` (CPUs, float64) and `triton_kernel`
(GPUs): `chunk_tokens`, `local_stats` and `gradients` over the rows of one rank. `exact_kernel`
computes the statistics over the rows of all ranks, in an exchange of its own. Padding, ignored
tokens and autograd are handled here. Rows beyond the vocabulary are padding and are not
computed. The compute dtype is float32, or float64 for float64 inputs.

To add a kernel: a module with these three functions, a name in `VocabKernel`, a branch in
`default_kernel` and `_select_kernel`; a test that runs the `CHECKS` of
`tests/actor/vocab/vocab_cases.py` with it.

Shape suffixes: N tokens, V local vocabulary rows, D hidden width, R tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor.vocab import exact_kernel, torch_kernel
from mega_agentrl.actor.vocab.partial_softmax import (
    MAX,
    SUM,
    TARGET,
    SoftmaxStats,
    empty_stats,
    logit_grad_coefficients,
    logp_entropy_from_stats,
    merge_stats,
)
from mega_agentrl.actor.vocab.tiling import compute_dtype, default_scratch_bytes, split_range
from mega_agentrl.config.errors import check_range
from mega_agentrl.errors import InputError
from mega_agentrl.numerics import elementary
from mega_agentrl.numerics.exact_sums import FixedPointRows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

IGNORED_TARGET = -100
"""A token with this target has log-prob 0, entropy 0 and no gradient."""


class VocabKernel(StrEnum):
    """Kernel that computes the logits; `auto` is triton on a GPU, except for float64."""

    auto = "auto"
    torch = "torch"
    triton = "triton"
    exact = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's rows of the output layer."""

    first_token_id: int
    """Token id of the first local row."""
    num_valid_rows: int
    """Local rows that are not padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None for one rank."""
    scratch_bytes: int | None = None
    """Bound on the bytes of logits in memory; None is the default for the device."""
    kernel: VocabKernel = VocabKernel.auto


def logp_and_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
    rows_of_ranks: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-prob of each target and the entropy of its distribution, with gradients.

    Waits for the other tensor ranks once per chunk.

    Args:
        hidden_ND: `[N, D]` hidden states, equal on all tensor ranks (the caller gathers them
            under sequence parallelism). Their gradient is summed over the ranks, but see
            `rows_of_ranks`.
        weight_VD: `[V/tp, D]` local rows, in the same dtype.
        target_N: `[N]` int64 global token ids, or `IGNORED_TARGET`.
        temperature: Divisor of the logits. The exact kernel rounds it to float32, in which engines
            have it.
        shard: The rows of `weight_VD` in the whole vocabulary, and their process group.
        rows_of_ranks: How many of the hidden states belong to tokens of each tensor rank, in order,
            under sequence parallelism. A rank then gets the gradient of its own and 0 for all
            others; with one number or none it gets all.

    Returns:
        `[N]` log-probs and `[N]` entropies in nats, in the compute dtype, equal on all tensor
        ranks.

    Raises:
        ValueError: If shapes, dtypes or the temperature do not fit, and on a CPU if no rank
            holds a target. On a GPU that check would synchronise with the device; there the
            log-prob of such a token is -inf.
    """
    _check_inputs(hidden_ND, weight_VD, target_N, temperature, shard)
    if shard.kernel is VocabKernel.exact:
        temperature = torch.tensor(temperature, dtype=torch.float32).item()
    return _LogpEntropy.apply(
        hidden_ND, weight_VD, target_N, temperature, shard, tuple(rows_of_ranks)
    )


class _LogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        temperature: float,
        shard: VocabShard,
        rows_of_ranks: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats_4N = _global_stats(hidden_ND, weight_VD, target_N, temperature, shard)
        valid_N = target_N != IGNORED_TARGET
        if not stats_4N.is_cuda:
            _check_targets_found(stats_4N, target_N, valid_N)
        log = elementary.log if shard.kernel is VocabKernel.exact else torch.log
        logp_N, entropy_N, softmax = logp_entropy_from_stats(stats_4N, valid_N, log)
        ctx.save_for_backward(
            hidden_ND,
            weight_VD,
            target_N,
            softmax.max_logit_N,
            softmax.log_sum_exp_N,
            softmax.entropy_N,
            valid_N,
        )
        ctx.temperature, ctx.vocab_shard = temperature, shard
        ctx.rows_of_ranks = rows_of_ranks
        ctx.set_materialize_grads(False)
        dtype = compute_dtype(hidden_ND.dtype)
        return logp_N.to(dtype), entropy_N.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, *softmax_tensors = ctx.saved_tensors
        max_logit_N, log_sum_exp_N, entropy_N, valid_N = softmax_tensors
        shard, dtype = ctx.vocab_shard, compute_dtype(hidden_ND.dtype)
        softmax = SoftmaxStats(
            max_logit_N=max_logit_N,
            log_sum_exp_N=log_sum_exp_N,
            entropy_N=entropy_N,
            valid_N=valid_N,
        )
        needs_hidden_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if needs_hidden_grad else None
        grad_weight_VD = _new_weight_grad(weight_VD, shard, target_N) if needs_weight_grad else None
        if len(target_N):
            _select_kernel(hidden_ND, shard).gradients(
                hidden_ND,
                weight_VD[: shard.num_valid_rows],
                _local_target_column(target_N, shard),
                logit_grad_coefficients(
                    softmax, grad_logp_N, grad_entropy_N, ctx.temperature, dtype
                ),
                ctx.temperature,
                _scratch_bytes(hidden_ND, shard),
                grad_hidden_ND,
                None if grad_weight_VD is None else grad_weight_VD[: shard.num_valid_rows],
            )
        if grad_hidden_ND is not None:
            if _num_ranks(shard) > 1 and len(target_N):
                _sum_over_ranks(grad_hidden_ND, shard.group, ctx.rows_of_ranks)
            grad_hidden_ND = grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def _sum_over_ranks(
    grad_ND: torch.Tensor, group: dist.ProcessGroup, rows_of_ranks: tuple[int, ...]
) -> None:
    """Sum a gradient in place, or with several ranks' rows this rank's, and set all others to 0."""
    if len(rows_of_ranks) <= 1:
        dist.all_reduce(grad_ND, group=group)
        return
    parts = grad_ND.split(rows_of_ranks)
    own_ND = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(own_ND, list(parts), group=group)
    grad_ND.zero_()
    parts[group.rank()].copy_(own_ND)


def _check_inputs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.size(1) != weight_VD.size(1):
        shapes = f"{tuple(hidden_ND.shape)} and {tuple(weight_VD.shape)}"
        raise InputError("shapes of hidden and weight", shapes, "[N, D] and [V, D]")
    if hidden_ND.dtype != weight_VD.dtype or not hidden_ND.is_floating_point():
        dtypes = f"{hidden_ND.dtype} and {weight_VD.dtype}"
        raise InputError("dtypes of hidden and weight", dtypes, "one floating-point type")
    if target_N.shape != hidden_ND.shape[:1]:
        raise InputError("shape of target", tuple(target_N.shape), f"[{hidden_ND.size(0)}]")
    if not 0 <= shard.num_valid_rows <= len(weight_VD):
        expected = f"0 to {len(weight_VD)}, the rows of weight"
        raise InputError("num_valid_rows", shard.num_valid_rows, expected)
    check_range(temperature > 0, "rollout.temperature", temperature, "above 0")


def _check_targets_found(
    stats_4N: torch.Tensor, target_N: torch.Tensor, valid_N: torch.Tensor
) -> None:
    finite_N = stats_4N[MAX].isfinite() & stats_4N[SUM].isfinite()
    missing_N = stats_4N[TARGET].isneginf() & finite_N & valid_N
    if missing_N.any():
        token = int(missing_N.nonzero()[0])
        raise InputError(
            f"target of token {token}",
            int(target_N[token]),
            f"an id within the vocabulary, or {IGNORED_TARGET} to ignore the token",
            "the tokenizer of another model",
        )


def default_kernel(device: torch.device, dtype: torch.dtype) -> VocabKernel:
    """Return the kernel that `VocabKernel.auto` stands for."""
    is_supported = device.type == "cuda" and dtype != torch.float64
    has_triton = is_supported and find_spec("triton") is not None
    return VocabKernel.triton if has_triton else VocabKernel.torch


def _select_kernel(hidden_ND: torch.Tensor, shard: VocabShard) -> ModuleType:
    kernel = shard.kernel
    if kernel == VocabKernel.auto:
        kernel = default_kernel(hidden_ND.device, hidden_ND.dtype)
    if kernel in (VocabKernel.torch, VocabKernel.exact):  # which differ in their statistics
        return torch_kernel
    # Imported here because triton is not installed on machines without a GPU.
    from mega_agentrl.actor.vocab import triton_kernel

    return triton_kernel


def _scratch_bytes(hidden_ND: torch.Tensor, shard: VocabShard) -> int:
    if shard.scratch_bytes is not None:
        return shard.scratch_bytes
    return default_scratch_bytes(hidden_ND.device)


def _num_ranks(shard: VocabShard) -> int:
    return 1 if shard.group is None else shard.group.size()


def _local_target_column(target_N: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return the `[N]` int64 local row of each target, -1 if this rank does not hold it."""
    column_N = target_N - shard.first_token_id
    return column_N.masked_fill((column_N < 0) | (column_N >= shard.num_valid_rows), -1)


def _new_weight_grad(
    weight_VD: torch.Tensor, shard: VocabShard, target_N: torch.Tensor
) -> torch.Tensor:
    """Allocate the gradient of the weight, with 0 in the rows that no kernel writes."""
    grad_VD = torch.empty_like(weight_VD)
    grad_VD[shard.num_valid_rows if len(target_N) else 0 :].zero_()
    return grad_VD


def _global_stats(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> torch.Tensor:
    """Compute the `[4, N]` float64 statistics over the rows of all ranks."""
    num_bytes = _scratch_bytes(hidden_ND, shard)
    column_N, valid_VD = _local_target_column(target_N, shard), weight_VD[: shard.num_valid_rows]
    if shard.kernel is VocabKernel.exact:
        rows, step = (
            FixedPointRows.from_rows(valid_VD),
            exact_kernel.chunk_tokens(len(weight_VD), num_bytes),
        )
        parts = [
            exact_kernel.global_stats(
                hidden_ND[tokens], rows, column_N[tokens], temperature, shard.group
            )
            for tokens in split_range(len(target_N), step)
        ]
        return torch.cat([empty_stats(0, hidden_ND.device), *parts], dim=1)
    kernel = _select_kernel(hidden_ND, shard)
    # Ranks differ in their valid rows, but must split the tokens alike.
    step = kernel.chunk_tokens(hidden_ND, len(weight_VD), num_bytes)
    chunks, num_ranks = list(split_range(len(target_N), step)), _num_ranks(shard)
    stats_R4N = hidden_ND.new_empty(num_ranks, 4, len(target_N), dtype=torch.float64)
    exchanges = []
    for tokens in chunks:
        local_4C = kernel.local_stats(
            hidden_ND[tokens], valid_VD, column_N[tokens], temperature, num_bytes
        )
        if num_ranks == 1:
            stats_R4N[0, :, tokens] = local_4C
        else:
            exchanges.append(_start_all_gather(local_4C, shard.group))
    for tokens, (work, gathered_R4C) in zip(chunks, exchanges, strict=False):
        work.wait()
        stats_R4N[:, :, tokens] = gathered_R4C
    return stats_R4N[0] if num_ranks == 1 else merge_stats(stats_R4N)


def _start_all_gather(
    local_4C: torch.Tensor, group: dist.ProcessGroup
) -> tuple[dist.Work, torch.Tensor]:
    """Start the all-gather of a chunk's `[4, C]` statistics; return its work and its output.

    The output is `[R, 4, C]` and valid after waiting for the work.
    """
    gathered_R4C = local_4C.new_empty(group.size(), *local_4C.shape)
    work = dist.all_gather_into_tensor(
        gathered_R4C.view(-1, local_4C.size(1)), local_4C, group=group, async_op=True
    )
    return work, gathered_R4C
