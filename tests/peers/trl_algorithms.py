"""TRL's losses (`GRPOTrainer._compute_loss`), with every aggregation that has one here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, nanstd

from mega_agentrl.algo import kl, policy_loss
from mega_agentrl.algo.masking import masked_moments
from tests.peers.comparison import Comparison, Reason
from tests.peers.losses import LONGEST, RANGE, value_and_gradient
from tests.peers.random_batches import RandomBatch, random_batches, with_one_advantage_per_row

MODES = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_sum_norm",
    "luspo": "seq_mean_token_sum",
}
KL_COEF = 0.05
EMPTY_ROW = Reason(
    "a response without a trained token counts in the mean there, as of a sampled one",
    lambda batch: not bool(batch.mask_BT.any(1).all()),
)


def _is_bounded_here(batch: RandomBatch) -> bool:
    gap_BT = torch.where(batch.mask_BT, batch.logp_BT - batch.old_logp_BT, 0.0)
    mean_B = gap_BT.sum(1) / batch.mask_BT.sum(1).clamp(min=1)
    kl_BT = kl.kl_penalty(batch.logp_BT, batch.ref_logp_BT, "k3")[batch.mask_BT]
    return bool(gap_BT.abs().max() > 20 or mean_B.max() > 10 or kl_BT.max() >= kl.K3_BOUND)


FAR_OFF = Reason(
    "log-ratios are bounded here: at 20, their mean at 10, and k3 at 10 nats", _is_bounded_here
)


def _with_one_weight_per_row(batch: RandomBatch) -> RandomBatch:
    """Return the batch with weights by row, as `GRPOTrainer` has them at the level of sequences."""
    return replace(batch, weight_BT=batch.weight_BT[:, :1].expand_as(batch.mask_BT).clone())


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield all comparisons."""
    for loss_type, mode in MODES.items():
        for level in ("token", "sequence"):
            reasons = (FAR_OFF,) if loss_type in ("bnpo", "dapo") else (FAR_OFF, EMPTY_ROW)
            yield Comparison(
                function=f"GRPOTrainer._compute_loss({loss_type}, {level}), weighted, with KL and "
                f"gradient = policy_loss.{'clipped' if level == 'token' else 'gspo'}, {mode}",
                inputs=map(
                    _with_one_weight_per_row,
                    map(with_one_advantage_per_row, random_batches(num_inputs // 2, 41)),
                )
                if level == "sequence"
                else map(with_one_advantage_per_row, random_batches(num_inputs // 2, 41)),
                ours=partial(_our_loss, mode, level),
                theirs=partial(_their_loss, loss_type, level),
                reasons=reasons,
            )
    yield Comparison(
        function="entropy_from_logits = entropy of a categorical distribution",
        inputs=random_batches(num_inputs, 42),
        ours=lambda b: torch.distributions.Categorical(logits=b.logp_BT).entropy(),
        theirs=lambda b: entropy_from_logits(b.logp_BT),
    )
    yield Comparison(
        function="nanstd = masking.masked_moments",
        inputs=random_batches(num_inputs, 43),
        ours=lambda b: masked_moments(b.value_BT, b.mask_BT)[1].sqrt().float(),
        theirs=lambda b: nanstd(b.value_BT.masked_fill(~b.mask_BT, torch.nan)),
        reasons=(
            Reason("the std of one number is 0 here and NaN there", lambda b: b.num_tokens == 1),
        ),
    )


def _our_loss(mode: str, level: str, batch: RandomBatch) -> list[torch.Tensor]:
    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        loss_of, gain = policy_loss.clipped, batch.advantage_BT
        if level == "sequence":
            loss_of, gain = policy_loss.gspo, batch.advantage_BT[:, 0]
        loss_BT, _ = loss_of(logp_BT, batch.old_logp_BT, gain, batch.mask_BT, **RANGE)
        loss_BT = loss_BT * torch.where(batch.mask_BT, batch.weight_BT, 0.0)
        loss_BT = loss_BT + KL_COEF * kl.kl_penalty(logp_BT, batch.ref_logp_BT, "k3")
        return policy_loss.aggregate(loss_BT, batch.mask_BT, mode, max_response_tokens=LONGEST)

    return value_and_gradient(batch, value)


def _their_loss(loss_type: str, level: str, batch: RandomBatch) -> list[torch.Tensor]:
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=RANGE["clip_low"],
        epsilon_high=RANGE["clip_high"],
        beta=KL_COEF,
        max_completion_length=LONGEST,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
    )
    tokens_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": tokens_BT,
        "prompt_mask": torch.ones_like(tokens_BT),
        "completion_ids": tokens_BT,
        "completion_mask": batch.mask_BT.float(),
        "advantages": batch.advantage_BT[:, 0],
        "old_per_token_logps": batch.old_logp_BT,
        "ref_per_token_logps": batch.ref_logp_BT,
        "importance_sampling_ratio": batch.weight_BT,
        "num_items_in_batch": batch.mask_BT.sum(),
    }

    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            logp_BT,
            torch.zeros(batch.mask_BT.shape),
            None,
        )
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return value_and_gradient(batch, value)
