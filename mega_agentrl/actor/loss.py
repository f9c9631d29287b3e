"""The objectives: what a micro-batch adds to the loss, and what it reports.

Policy gradient: the policy loss (`policy_term`), plus weighted KL to the reference, minus an
entropy bonus, all aggregated with one denominator counted over the whole optimizer step, so that
neither the cut into micro-batches nor the number of data ranks changes the gradient. Supervised:
mean negative log-prob over the masked tokens. A context rank adds the tokens that it predicts
itself, and a row's mean is still over the whole row. The formulas themselves are in `algo/`.

Suffixes: R rows of a micro-batch, B rows of the batch, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.policy_term import CLIP_METRICS, policy_term
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.policy_loss import aggregate, count
from mega_agentrl.config.choices import KlPlace, PolicyLoss

if TYPE_CHECKING:
    from mega_agentrl.actor.packing import MicroBatch
    from mega_agentrl.actor.schedule import Share
    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

POLICY_METRICS = ("policy_loss", *CLIP_METRICS, "entropy", "ref_kl")
SUPERVISED_METRICS = ("entropy",)


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Policy loss of one optimizer step.

    batch: all rows; `old_logp_BT` and `advantage_BT` are needed, `ref_logp_BT` with a KL term;
    `correction_BT` weighs the policy loss where it is there. mask_BT: [B, T] the tokens of this
    step's rows, each row whole or not at all. kl_weight_BT: [B, T] weight of the KL term per
    token, in place of algo.kl_coef. `ref_kl` is reported wherever a reference was scored, in the
    loss or not.
    """

    algo: AlgoConfig
    batch: TrainBatch
    mask_BT: torch.Tensor
    kl_weight_BT: torch.Tensor | None = None

    def __post_init__(self) -> None:
        needed = ["old_logp_BT", "advantage_BT"] + (["ref_logp_BT"] if self.with_kl else [])
        missing = [name for name in needed if getattr(self.batch, name) is None]
        if missing:
            raise ValueError(
                f"update: the batch has no {', '.join(missing)}; expected them from add_logprobs "
                "and add_advantages before the update"
            )

    @property
    def with_kl(self) -> bool:
        """Whether the loss has a KL term."""
        in_loss = self.algo.kl_coef > 0 and self.algo.kl_place is KlPlace.loss
        return self.kl_weight_BT is not None or in_loss

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, Share]:
        rows, device = list(micro.rows), logp_RT.device
        mask_RT = self.mask_BT[rows].to(device)
        here_RT = mask_RT & micro.predicted(mask_RT.size(1))
        whole = micro.context_size == 1
        assert whole or self.algo.loss is not PolicyLoss.gspo, "check_algo lets gspo cut no rows"
        loss_RT, info = policy_term(
            self.algo,
            logp_RT,
            self.batch.old_logp_BT[rows].to(device),
            self.batch.advantage_BT[rows].to(device),
            here_RT,
            None if self.batch.correction_BT is None else self.batch.correction_BT[rows].to(device),
        )
        num_tokens = here_RT.sum().float()
        sums = {name: value * num_tokens for name, value in info.items()}
        sums["policy_loss"] = loss_RT.detach().sum()
        sums["ref_kl"] = torch.zeros((), device=device)
        if self.batch.ref_logp_BT is not None:
            kl_RT = kl_penalty(logp_RT, self.batch.ref_logp_BT[rows].to(device), self.algo.kl_kind)
            kl_RT = torch.where(here_RT, kl_RT, 0.0)
            sums["ref_kl"] = kl_RT.detach().sum()
            if self.with_kl:
                loss_RT = loss_RT + self._kl_weight(rows, device) * kl_RT
        if self.algo.entropy_coef:
            loss_RT = loss_RT - self.algo.entropy_coef * entropy_RT
        sums["entropy"] = entropy_RT.detach()[here_RT].sum()
        mode = str(self.algo.aggregation)
        loss = aggregate(loss_RT, mask_RT, mode, denominator=count(self.mask_BT, mode).item())
        return loss, {"loss": loss.detach(), "num_tokens": num_tokens, **sums}

    def _kl_weight(self, rows: list[int], device: torch.device) -> torch.Tensor | float:
        if self.kl_weight_BT is None:
            return self.algo.kl_coef
        return self.kl_weight_BT[rows].to(device)


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Mean negative log-prob of the masked tokens of the batch. mask_BT: [B, T]."""

    mask_BT: torch.Tensor

    def __call__(
        self, micro: MicroBatch, logp_RT: torch.Tensor, entropy_RT: torch.Tensor
    ) -> tuple[torch.Tensor, Share]:
        mask_RT = self.mask_BT[list(micro.rows)].to(logp_RT.device)
        here_RT = mask_RT & micro.predicted(mask_RT.size(1))
        mode = "token_mean"
        loss = aggregate(-logp_RT, mask_RT, mode, denominator=count(self.mask_BT, mode).item())
        return loss, {
            "loss": loss.detach(),
            "num_tokens": here_RT.sum().float(),
            "entropy": entropy_RT.detach()[here_RT].sum(),
        }
