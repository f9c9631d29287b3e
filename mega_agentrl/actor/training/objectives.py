"""Training objectives of the policy: loss and metrics of a micro-batch.

The RL objective is the policy loss (`compute_policy_loss`), plus the weighted KL divergence
from the reference, minus an entropy bonus. They are aggregated with one denominator that is
counted over the whole optimizer step, so the gradient depends neither on the split into
micro-batches nor on the number of data ranks. The SFT objective is the mean negative log-prob
of the masked tokens. A context rank adds only the tokens that it predicts, and the mean of a row
is still over the whole row. The losses are in `actor.training.losses`, the formulas in `algo/`.

Shape suffixes: R rows of a micro-batch, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.device import from_host
from mega_agentrl.actor.training.losses import find_loss
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.masking import masked_sum
from mega_agentrl.algo.policy_loss import aggregate
from mega_agentrl.config.enums import KlPlacement
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.actor.training.losses import RegisteredLoss
    from mega_agentrl.actor.training.packing import MicroBatch
    from mega_agentrl.actor.training.pipeline_schedule import MicroBatchStats
    from mega_agentrl.batch.packed_rows import PackedTargets
    from mega_agentrl.config.sections.algo import AlgoConfig

CLIP_METRICS = ("clipfrac", "clipfrac_lower", "approx_kl")
"""Metrics that are reported with every loss; 0 if the loss does not have them."""
SFT_METRICS = ("entropy",)


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """RL objective of one optimizer step.

    The metric `ref_kl` is reported whenever there are reference log-probs, even if the loss has no
    KL term.
    """

    algo: AlgoConfig
    targets: PackedTargets
    """Targets of the rows of the data rank. `advantage` is required, `ref_logp` with a KL term;
    without `old_logp` the ratios are 1, as in the first step of an update; `importance_weight`
    weighs the policy loss if it is set, `kl_weight` replaces `algo.kl_coef`."""
    denominator: float
    """Divisor of the loss, counted over the whole step."""

    def __post_init__(self) -> None:
        required = ["advantage"] + (["ref_logp"] if self.has_kl_term else [])
        require_targets(self.targets, required, "update", "compute_log_probs")

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss has a KL term."""
        in_loss = self.algo.kl_coef > 0 and self.algo.kl_placement is KlPlacement.loss
        return self.targets.kl_weight_M is not None or in_loss

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` tensors."""

        def pad(name: str) -> torch.Tensor:
            return from_host(self.targets.padded(name, micro.rows), logp_RT.device)

        mask_RT = pad("mask")
        # The trained tokens that this context rank predicts.
        local_mask_RT = mask_RT & micro.predicted_mask(mask_RT.size(1))
        assert micro.context_size == 1 or not find_loss(self.algo).traits.needs_uncut_rows, (
            "check_algo refuses losses per trajectory or turn with context parallelism"
        )
        loss_RT, info = compute_policy_loss(
            self.algo,
            logp_RT,
            logp_RT.detach() if self.targets.old_logp_M is None else pad("old_logp"),
            pad("advantage"),
            local_mask_RT,
            None if self.targets.importance_weight_M is None else pad("importance_weight"),
        )
        num_tokens = local_mask_RT.sum().float()
        sums = {name: value * num_tokens for name, value in info.items()}
        sums["policy_loss"] = loss_RT.detach().sum()
        sums["ref_kl"] = torch.zeros((), device=logp_RT.device)
        if self.targets.ref_logp_M is not None:
            kl_RT = kl_penalty(logp_RT, pad("ref_logp"), self.algo.kl_estimator)
            kl_RT = torch.where(local_mask_RT, kl_RT, 0.0)
            sums["ref_kl"] = kl_RT.detach().sum()
            if self.has_kl_term:
                has_weight = self.targets.kl_weight_M is not None
                loss_RT = loss_RT + (pad("kl_weight") if has_weight else self.algo.kl_coef) * kl_RT
        if self.algo.entropy_coef:
            loss_RT = loss_RT - self.algo.entropy_coef * entropy_RT
        sums["entropy"] = masked_sum(entropy_RT.detach(), local_mask_RT)
        loss = aggregate(
            loss_RT,
            mask_RT,
            str(self.algo.loss_aggregation),
            denominator=self.denominator,
            num_tokens_B=trajectory_lengths(self.targets, micro, logp_RT.device),
        )
        return loss, {"loss": loss.detach(), "num_tokens": num_tokens, **sums}


@dataclass(frozen=True, slots=True)
class SftObjective:
    """Mean negative log-prob of the masked tokens of the batch."""

    targets: PackedTargets
    denominator: float
    """Number of masked tokens of the whole batch."""

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` tensors."""
        mask_RT = from_host(self.targets.padded("mask", micro.rows), logp_RT.device)
        local_mask_RT = mask_RT & micro.predicted_mask(mask_RT.size(1))
        loss = aggregate(-logp_RT, mask_RT, "token_mean", denominator=self.denominator)
        return loss, {
            "loss": loss.detach(),
            "num_tokens": local_mask_RT.sum().float(),
            "entropy": masked_sum(entropy_RT.detach(), local_mask_RT),
        }


def trajectory_lengths(
    targets: PackedTargets, micro: MicroBatch, device: torch.device
) -> torch.Tensor | None:
    """Return `[R]` trained tokens of each row's trajectory, or None if each row is one."""
    num_tokens_R = targets.num_tokens(micro.rows)
    return None if num_tokens_R is None else from_host(num_tokens_R, device)


def require_targets(targets: PackedTargets, names: Sequence[str], what: str, source: str) -> None:
    """Raise `ValueError` if one of the targets is None.

    Args:
        targets: The targets of an update.
        names: Names of the required fields, as in `POLICY_TARGETS`.
        what: The update, for the message.
        source: Name of the method that computes the first of the targets, for the message.
    """
    missing = [f"{name}_BT" for name in names if getattr(targets, f"{name}_M") is None]
    if missing:
        raise InputError(
            f"{what}: fields that the batch lacks",
            missing,
            f"none after {source} and the computation of the advantages",
        )


def policy_metrics(algo: AlgoConfig) -> tuple[str, ...]:
    """Return the names of the metrics of `PolicyObjective`: the common ones and the loss's own."""
    return ("policy_loss", *_loss_metrics(find_loss(algo)), "entropy", "ref_kl")


def _loss_metrics(loss: RegisteredLoss) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*CLIP_METRICS, *loss.traits.metrics)))


def compute_policy_loss(
    algo: AlgoConfig,
    logp_RT: torch.Tensor,
    old_logp_RT: torch.Tensor,
    advantage_RT: torch.Tensor,
    mask_RT: torch.Tensor,
    correction_RT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy-gradient term of every token, selected by `algo.loss`.

        loss_t = correction_t * l(logp_t, old_logp_t, A_t)

    l is the loss of `find_loss`. The correction weighs only this term, not the KL term or
    the entropy bonus, and does not change any denominator.

    A loss per trajectory (gspo) has one ratio per row and uses the mean advantage over the row's
    trained tokens, so it needs whole rows with one advantage each; the config checks refuse
    settings that violate this. A loss per turn (atpo) needs whole turns.

    Args:
        algo: Loss and its options.
        logp_RT: `[R, T]` log-probs with gradient.
        old_logp_RT: `[R, T]` log-probs before the update.
        advantage_RT: `[R, T]`.
        mask_RT: `[R, T]` bool, the trained tokens.
        correction_RT: `[R, T]` weights without gradient; None weighs all tokens equally.

    Returns:
        `[R, T]` loss, 0 where masked, and 0-d metrics over the trained tokens: `CLIP_METRICS` and
        the metrics that the loss is registered with.
    """
    loss = find_loss(algo)
    loss_RT, info = loss(logp_RT, old_logp_RT, advantage_RT, mask_RT, **algo.loss_options)
    if correction_RT is not None:
        # Masked positions may hold NaN, so the weights are replaced instead of multiplied by 0.
        zero_RT = torch.zeros_like(correction_RT)
        loss_RT = loss_RT * torch.where(mask_RT.bool(), correction_RT, zero_RT)
    zero = loss_RT.new_zeros(())
    return loss_RT, {name: info.get(name, zero).detach() for name in _loss_metrics(loss)}
