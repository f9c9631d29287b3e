"""Training objectives of the policy: loss and metrics of a micro-batch.

The RL objective is the policy loss (`training.policy_loss`), plus the weighted KL divergence
from the reference, minus an entropy bonus. They are aggregated with one denominator that is
counted over the whole optimizer step, so the gradient depends neither on the split into
micro-batches nor on the number of data ranks. The SFT objective is the mean negative log-prob
of the masked tokens. A context rank adds only the tokens that it predicts, and the mean of a row
is still over the whole row. The formulas are in `algo/`.

Shape suffixes: R rows of a micro-batch, B rows of the batch, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.training.policy_loss import CLIP_METRICS, compute_policy_loss
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.policy_loss import aggregate, loss_denominator
from mega_agentrl.config.enums import KlPlacement, PolicyLoss

if TYPE_CHECKING:
    from mega_agentrl.actor.training.packing import MicroBatch
    from mega_agentrl.actor.training.pipeline_schedule import MicroBatchStats
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

POLICY_METRICS = ("policy_loss", *CLIP_METRICS, "entropy", "ref_kl")
SFT_METRICS = ("entropy",)


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """RL objective of one optimizer step.

    The metric `ref_kl` is reported whenever the batch has reference log-probs, even if the loss
    has no KL term.
    """

    algo: AlgoConfig
    batch: TrainBatch
    """All rows. `old_logp_BT` and `advantage_BT` are required, `ref_logp_BT` with a KL term;
    `importance_weight_BT` weighs the policy loss if it is set."""
    mask_BT: torch.Tensor
    """`[B, T]` bool, the trained tokens of this step's rows; a row is in it whole or not at all."""
    kl_weight_BT: torch.Tensor | None = None
    """`[B, T]` weight of the KL term per token; replaces `algo.kl_coef`."""

    def __post_init__(self) -> None:
        needed = ["old_logp_BT", "advantage_BT"] + (["ref_logp_BT"] if self.has_kl_term else [])
        missing = [name for name in needed if getattr(self.batch, name) is None]
        if missing:
            raise ValueError(
                f"update: the batch has no {', '.join(missing)}; expected them from "
                "compute_log_probs and from the advantages before the update"
            )

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss has a KL term."""
        in_loss = self.algo.kl_coef > 0 and self.algo.kl_placement is KlPlacement.loss
        return self.kl_weight_BT is not None or in_loss

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` tensors."""
        rows, device = list(micro.rows), logp_RT.device
        mask_RT = self.mask_BT[rows].to(device)
        here_RT = mask_RT & micro.predicted_mask(mask_RT.size(1))
        whole = micro.context_size == 1
        assert whole or self.algo.loss is not PolicyLoss.gspo, (
            "check_algo refuses gspo with context parallelism"
        )
        loss_RT, info = compute_policy_loss(
            self.algo,
            logp_RT,
            self.batch.old_logp_BT[rows].to(device),
            self.batch.advantage_BT[rows].to(device),
            here_RT,
            None
            if self.batch.importance_weight_BT is None
            else self.batch.importance_weight_BT[rows].to(device),
        )
        num_tokens = here_RT.sum().float()
        sums = {name: value * num_tokens for name, value in info.items()}
        sums["policy_loss"] = loss_RT.detach().sum()
        sums["ref_kl"] = torch.zeros((), device=device)
        if self.batch.ref_logp_BT is not None:
            kl_RT = kl_penalty(
                logp_RT, self.batch.ref_logp_BT[rows].to(device), self.algo.kl_estimator
            )
            kl_RT = torch.where(here_RT, kl_RT, 0.0)
            sums["ref_kl"] = kl_RT.detach().sum()
            if self.has_kl_term:
                loss_RT = loss_RT + self._kl_weight(rows, device) * kl_RT
        if self.algo.entropy_coef:
            loss_RT = loss_RT - self.algo.entropy_coef * entropy_RT
        sums["entropy"] = entropy_RT.detach()[here_RT].sum()
        aggregation = str(self.algo.loss_aggregation)
        denominator = loss_denominator(self.mask_BT, aggregation).item()
        loss = aggregate(loss_RT, mask_RT, aggregation, denominator=denominator)
        return loss, {"loss": loss.detach(), "num_tokens": num_tokens, **sums}

    def _kl_weight(self, rows: list[int], device: torch.device) -> torch.Tensor | float:
        if self.kl_weight_BT is None:
            return self.algo.kl_coef
        return self.kl_weight_BT[rows].to(device)


@dataclass(frozen=True, slots=True)
class SftObjective:
    """Mean negative log-prob of the masked tokens of the batch."""

    mask_BT: torch.Tensor
    """`[B, T]` bool."""

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` tensors."""
        mask_RT = self.mask_BT[list(micro.rows)].to(logp_RT.device)
        here_RT = mask_RT & micro.predicted_mask(mask_RT.size(1))
        aggregation = "token_mean"
        denominator = loss_denominator(self.mask_BT, aggregation).item()
        loss = aggregate(-logp_RT, mask_RT, aggregation, denominator=denominator)
        return loss, {
            "loss": loss.detach(),
            "num_tokens": here_RT.sum().float(),
            "entropy": entropy_RT.detach()[here_RT].sum(),
        }
