"""Token log-prob and exact entropy from hidden states, over a vocabulary cut by tensor rank.

The language-model head and its softmax as one differentiable function that never holds a
[N, V/tp] tensor. Tokens go through in chunks whose size follows from a bound on scratch bytes;
of each chunk a rank keeps four numbers a token (`vocab_softmax` has the maths), which one
all-gather a chunk makes global while the next chunk's product runs. The backward pass computes
the logits again; an output without a gradient costs it nothing.

Two kernels, one interface: `vocab_torch` (CPUs, float64) and `vocab_triton` (GPUs). Both offer
`chunk_tokens`, `local_stats` and `gradients` over one rank's columns; groups, padding, ignored
tokens and autograd are here. Temperature included. Rows beyond the vocabulary are padding and
are never computed. Type of computation: float32, float64 for float64 input.

Suffixes: N tokens, V local vocabulary rows, D hidden width, R tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor import vocab_torch
from mega_agentrl.actor.vocab_softmax import MAX, SUM, TARGET, Softmax, merge, outputs, slopes
from mega_agentrl.actor.vocab_tiles import compute_dtype, cut, default_scratch_bytes

if TYPE_CHECKING:
    from types import ModuleType

# A token with this target has log-prob 0, entropy 0 and no gradient.
IGNORED_TARGET = -100


class Kernel(StrEnum):
    """What computes logits: `auto` is triton for float32 and below on a GPU, else torch."""

    auto = "auto"
    torch = "torch"
    triton = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's part of the vocabulary.

    start: id of the first local row. num_valid: local rows that are not padding.
    group: tensor-parallel group; None for one rank. reduce_hidden: sum the hidden states'
    gradient over the group; False leaves each rank's own part, for a caller that reduces (and
    scatters) it itself. scratch_bytes: bound on the logits in memory at once; None is the
    kernel's own default for the device. kernel: what computes them.
    """

    start: int
    num_valid: int
    group: dist.ProcessGroup | None
    reduce_hidden: bool = True
    scratch_bytes: int | None = None
    kernel: Kernel = Kernel.auto


def logp_and_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy in nats of its distribution, with gradients.

    hidden_ND: [N, D] float, equal on all tensor ranks (under sequence parallelism gathered by
    the caller); its gradient is summed over them unless `shard.reduce_hidden` is False.
    weight_VD: [V/tp, D] local rows, of the same type. target_N: [N] int64 global token ids, or
    IGNORED_TARGET. Returns two [N] tensors, float32 or, for float64 input, float64, equal on
    all tensor ranks.

    Errors: ValueError for shapes, types or a temperature that do not fit, and on a CPU for a
    target that no rank holds; on a GPU that would wait for the device, and such a token's
    log-prob is -inf instead. Waits for: the other tensor ranks, once a chunk.
    """
    _check(hidden_ND, weight_VD, target_N, temperature, shard)
    return _LogpEntropy.apply(hidden_ND, weight_VD, target_N, temperature, shard)


class _LogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        temperature: float,
        shard: VocabShard,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats_4N = _global_stats(hidden_ND, weight_VD, target_N, temperature, shard)
        kept_N = target_N != IGNORED_TARGET
        if not stats_4N.is_cuda:
            _check_found(stats_4N, target_N, kept_N)
        logp_N, entropy_N, softmax = outputs(stats_4N, kept_N)
        ctx.save_for_backward(
            hidden_ND,
            weight_VD,
            target_N,
            softmax.center_N,
            softmax.log_sum_N,
            softmax.entropy_N,
            kept_N,
        )
        ctx.temperature, ctx.shard = temperature, shard
        ctx.set_materialize_grads(False)
        dtype = compute_dtype(hidden_ND.dtype)
        return logp_N.to(dtype), entropy_N.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, center_N, log_sum_N, entropy_N, kept_N = ctx.saved_tensors
        shard, dtype = ctx.shard, compute_dtype(hidden_ND.dtype)
        softmax = Softmax(
            center_N=center_N, log_sum_N=log_sum_N, entropy_N=entropy_N, kept_N=kept_N
        )
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if want_hidden else None
        grad_weight_VD = _unwritten(weight_VD, shard, target_N) if want_weight else None
        if len(target_N):
            _kernel(hidden_ND, shard).gradients(
                hidden_ND,
                weight_VD[: shard.num_valid],
                _local_column(target_N, shard),
                slopes(softmax, grad_logp_N, grad_entropy_N, ctx.temperature, dtype),
                ctx.temperature,
                _scratch_bytes(hidden_ND, shard),
                grad_hidden_ND,
                None if grad_weight_VD is None else grad_weight_VD[: shard.num_valid],
            )
        if grad_hidden_ND is not None:
            if shard.reduce_hidden and _num_ranks(shard) > 1 and len(target_N):
                dist.all_reduce(grad_hidden_ND, group=shard.group)
            grad_hidden_ND = grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None


def _check(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.size(1) != weight_VD.size(1):
        raise ValueError(
            f"logp_and_entropy: hidden {tuple(hidden_ND.shape)} and weight "
            f"{tuple(weight_VD.shape)}; expected [N, D] and [V, D]"
        )
    if hidden_ND.dtype != weight_VD.dtype or not hidden_ND.is_floating_point():
        raise ValueError(
            f"logp_and_entropy: hidden {hidden_ND.dtype} and weight {weight_VD.dtype}; "
            "expected one floating-point type"
        )
    if target_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"logp_and_entropy: target {tuple(target_N.shape)}, expected [{hidden_ND.size(0)}]"
        )
    if not 0 <= shard.num_valid <= len(weight_VD):
        raise ValueError(
            f"logp_and_entropy: num_valid={shard.num_valid}, expected 0 to {len(weight_VD)}, the "
            "rows of weight"
        )
    if temperature <= 0:
        raise ValueError(f"rollout.temperature={temperature}: expected above 0")


def _check_found(stats_4N: torch.Tensor, target_N: torch.Tensor, kept_N: torch.Tensor) -> None:
    finite_N = stats_4N[MAX].isfinite() & stats_4N[SUM].isfinite()
    lost_N = stats_4N[TARGET].isneginf() & finite_N & kept_N
    if lost_N.any():
        token = int(lost_N.nonzero()[0])
        raise ValueError(
            f"logp_and_entropy: target {int(target_N[token])} of token {token} is in no rank's "
            f"rows; expected an id within the vocabulary, or {IGNORED_TARGET} to ignore the "
            "token (does the tokenizer belong to this model?)"
        )


def _kernel(hidden_ND: torch.Tensor, shard: VocabShard) -> ModuleType:
    wanted = shard.kernel
    if wanted == Kernel.auto:
        narrow = hidden_ND.dtype != torch.float64
        fits = hidden_ND.is_cuda and narrow and find_spec("triton") is not None
        wanted = Kernel.triton if fits else Kernel.torch
    if wanted == Kernel.torch:
        return vocab_torch
    # Only here: triton is absent where nothing but CPUs is.
    from mega_agentrl.actor import vocab_triton

    return vocab_triton


def _scratch_bytes(hidden_ND: torch.Tensor, shard: VocabShard) -> int:
    if shard.scratch_bytes is not None:
        return shard.scratch_bytes
    return default_scratch_bytes(hidden_ND.device)


def _num_ranks(shard: VocabShard) -> int:
    return 1 if shard.group is None else shard.group.size()


def _local_column(target_N: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[N] int64 local row of each target, -1 where another rank or none has it."""
    column_N = target_N - shard.start
    return column_N.masked_fill((column_N < 0) | (column_N >= shard.num_valid), -1)


def _unwritten(weight_VD: torch.Tensor, shard: VocabShard, target_N: torch.Tensor) -> torch.Tensor:
    """A gradient for the weight, 0 in the rows that no kernel writes."""
    grad_VD = torch.empty_like(weight_VD)
    grad_VD[shard.num_valid if len(target_N) else 0 :].zero_()
    return grad_VD


def _global_stats(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> torch.Tensor:
    """[4, N] float64 over all columns of all ranks."""
    kernel, num_bytes = _kernel(hidden_ND, shard), _scratch_bytes(hidden_ND, shard)
    column_N, valid_VD = _local_column(target_N, shard), weight_VD[: shard.num_valid]
    # Ranks differ in their valid rows, and must cut the tokens alike.
    step = kernel.chunk_tokens(hidden_ND, len(weight_VD), num_bytes)
    chunks, ranks = list(cut(len(target_N), step)), _num_ranks(shard)
    stats_R4N = hidden_ND.new_empty(ranks, 4, len(target_N), dtype=torch.float64)
    exchanges = []
    for tokens in chunks:
        local_4C = kernel.local_stats(
            hidden_ND[tokens], valid_VD, column_N[tokens], temperature, num_bytes
        )
        if ranks == 1:
            stats_R4N[0, :, tokens] = local_4C
        else:
            exchanges.append(_start_exchange(local_4C, shard.group))
    for tokens, (work, gathered_R4C) in zip(chunks, exchanges, strict=False):
        work.wait()
        stats_R4N[:, :, tokens] = gathered_R4C
    return stats_R4N[0] if ranks == 1 else merge(stats_R4N)


def _start_exchange(
    local_4C: torch.Tensor, group: dist.ProcessGroup
) -> tuple[dist.Work, torch.Tensor]:
    """A chunk's statistics on their way to all ranks, and the [R, 4, C] where they will be."""
    gathered_R4C = local_4C.new_empty(group.size(), *local_4C.shape)
    work = dist.all_gather_into_tensor(
        gathered_R4C.view(-1, local_4C.size(1)), local_4C, group=group, async_op=True
    )
    return work, gathered_R4C
