"""Token log-prob and exact entropy from hidden states, over a vocabulary cut by tensor rank.

With logits l = W h / temperature, Z = sum_j exp(l_j):

    logp = l_target - log Z          dlogp/dl_j = 1[j = target] - p_j
    H    = log Z - sum_j p_j l_j     dH/dl_j    = -p_j (log p_j + H)

Each rank computes its columns in chunks of tokens and keeps four numbers a token (its maximum,
sum of exponentials, their weighted logit sum, and the target's logit); one exchange over the
tensor group for the whole micro-batch makes them global. The backward pass computes each
chunk's logits again, so no [N, V/tp] tensor outlives a chunk. Float32 inside (float64 for
float64 input). Columns beyond the vocabulary are padding and are never computed.

Suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's part of the vocabulary.

    start: id of the first local row. num_valid: local rows that are not padding.
    group: tensor-parallel group; None for one rank. chunk_tokens: tokens computed at once.
    """

    start: int
    num_valid: int
    group: dist.ProcessGroup | None
    chunk_tokens: int = 1024


def logp_and_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy in nats of its distribution, with gradients.

    hidden_ND: [N, D], equal on all tensor ranks; its gradient is summed over them.
    weight_VD: [V/tp, D] local rows. target_N: [N] int64 global token ids.
    Returns two [N] float32 tensors, equal on all tensor ranks.
    """
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.size(1) != weight_VD.size(1):
        raise ValueError(
            f"logp_and_entropy: hidden {tuple(hidden_ND.shape)} and weight "
            f"{tuple(weight_VD.shape)}; expected [N, D] and [V, D]"
        )
    if target_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"logp_and_entropy: target {tuple(target_N.shape)}, expected [{hidden_ND.size(0)}]"
        )
    if temperature <= 0:
        raise ValueError(f"rollout.temperature={temperature}: expected above 0")
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
        local_4N = torch.cat(
            [
                _local_stats(
                    _logits(hidden_ND[part], weight_VD, temperature, shard), target_N[part], shard
                )
                for part in _chunks(len(target_N), shard)
            ]
            or [hidden_ND.new_zeros(4, 0, dtype=_compute_dtype(hidden_ND))],
            dim=1,
        )
        max_N, sum_N, weighted_N, target_logit_N = _combine(local_4N, shard.group)
        log_z_N = max_N + sum_N.log()
        entropy_N = log_z_N - weighted_N / sum_N
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, log_z_N, entropy_N)
        ctx.temperature, ctx.shard = temperature, shard
        ctx.set_materialize_grads(False)
        return target_logit_N - log_z_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, log_z_N, entropy_N = ctx.saved_tensors
        shard, dtype = ctx.shard, log_z_N.dtype
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype)
        valid_VD = weight_VD[: shard.num_valid]
        for part in _chunks(len(target_N), shard):
            grad_CV = _grad_logits(
                _logits(hidden_ND[part], weight_VD, ctx.temperature, shard),
                target_N[part],
                log_z_N[part],
                entropy_N[part],
                None if grad_logp_N is None else grad_logp_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
                shard,
            ).div_(ctx.temperature)
            grad_hidden_ND[part] = grad_CV.to(valid_VD.dtype) @ valid_VD
            grad_weight_VD[: shard.num_valid].addmm_(grad_CV.t(), hidden_ND[part].to(dtype))
        if shard.group is not None and len(target_N):
            dist.all_reduce(grad_hidden_ND, group=shard.group)
        return (
            grad_hidden_ND.to(hidden_ND.dtype),
            grad_weight_VD.to(weight_VD.dtype),
            None,
            None,
            None,
        )


def _compute_dtype(value: torch.Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _chunks(num_tokens: int, shard: VocabShard) -> list[slice]:
    step = shard.chunk_tokens
    return [slice(start, start + step) for start in range(0, num_tokens, step)]


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperature: float, shard: VocabShard
) -> torch.Tensor:
    logits_CV = hidden_CD @ weight_VD[: shard.num_valid].t()
    return logits_CV.to(_compute_dtype(hidden_CD)).div_(temperature)


def _local_column(target_C: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
    column_C = target_C - shard.start
    here_C = (column_C >= 0) & (column_C < shard.num_valid)
    return column_C * here_C, here_C


def _local_stats(
    logits_CV: torch.Tensor, target_C: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """[4, C]: maximum, sum exp(l - max), sum exp(l - max) * l, target's logit or 0."""
    if not shard.num_valid:
        zero_C = logits_CV.new_zeros(len(target_C))
        return torch.stack([torch.full_like(zero_C, -torch.inf), zero_C, zero_C, zero_C])
    max_C = logits_CV.amax(dim=1)
    exp_CV = (logits_CV - max_C[:, None]).exp_()
    column_C, here_C = _local_column(target_C, shard)
    target_logit_C = logits_CV.gather(1, column_C[:, None]).squeeze(1)
    weighted_C = torch.einsum("cv,cv->c", exp_CV, logits_CV)
    return torch.stack([max_C, exp_CV.sum(dim=1), weighted_C, target_logit_C * here_C])


def _combine(local_4N: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[4, N] over all tensor ranks, with one all-gather."""
    if group is None or group.size() == 1 or not local_4N.size(1):
        return local_4N
    parts = [torch.empty_like(local_4N) for _ in range(group.size())]
    dist.all_gather(parts, local_4N, group=group)
    all_T4N = torch.stack(parts)
    max_N = all_T4N[:, 0].amax(dim=0)
    scale_TN = (all_T4N[:, 0] - max_N).exp()
    return torch.stack(
        [
            max_N,
            (all_T4N[:, 1] * scale_TN).sum(dim=0),
            (all_T4N[:, 2] * scale_TN).sum(dim=0),
            all_T4N[:, 3].sum(dim=0),
        ]
    )


def _grad_logits(
    logits_CV: torch.Tensor,
    target_C: torch.Tensor,
    log_z_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_logp_C: torch.Tensor | None,
    grad_entropy_C: torch.Tensor | None,
    shard: VocabShard,
) -> torch.Tensor:
    logp_CV = logits_CV.sub_(log_z_C[:, None])
    prob_CV = logp_CV.exp()
    if grad_entropy_C is None:
        grad_CV = torch.zeros_like(prob_CV) if grad_logp_C is None else None
    else:
        grad_CV = logp_CV.add_(entropy_C[:, None]).mul_(prob_CV).mul_(-grad_entropy_C[:, None])
    if grad_logp_C is None:
        return grad_CV
    column_C, here_C = _local_column(target_C, shard)
    pull_CV = prob_CV.mul_(-grad_logp_C[:, None])
    if shard.num_valid:
        pull_CV.scatter_add_(1, column_C[:, None], (grad_logp_C * here_C)[:, None])
    return pull_CV if grad_CV is None else grad_CV.add_(pull_CV)
