"""OpenRLHF's losses, KL, controller and advantages (`openrlhf.models`, `openrlhf.trainer`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from openrlhf.models.loss import PolicyLoss, ValueLoss
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

from mega_agentrl.algo import advantage, kl, policy_loss
from mega_agentrl.algo.correction import importance_weights
from mega_agentrl.algo.value_loss import clipped_value_loss
from tests.peers.comparison import Comparison, Reason
from tests.peers.losses import DUAL, RANGE, value_and_gradient
from tests.peers.random_batches import RandomBatch, random_batches, with_one_advantage_per_row

MODES = {True: "token_mean", False: "seq_mean_token_mean"}


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield all comparisons."""
    yield from _loss_comparisons(num_inputs)
    yield from _advantage_comparisons(num_inputs)


def _loss_comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield those of losses and of the KL divergence."""
    for by_token, mode in MODES.items():
        yield Comparison(
            function=f"PolicyLoss(token_level_loss={by_token}), dual clip, with gradient = "
            f"policy_loss.clipped, {mode}",
            inputs=random_batches(num_inputs, 31),
            ours=partial(_our_loss, mode, corrected=False),
            theirs=partial(
                _their_loss,
                PolicyLoss(*RANGE.values(), dual_clip=DUAL, token_level_loss=by_token),
            ),
        )
    yield Comparison(
        function="PolicyLoss(gspo), with gradient = policy_loss.gspo, seq_mean_token_mean",
        inputs=map(with_one_advantage_per_row, random_batches(num_inputs, 32)),
        ours=_our_gspo,
        theirs=partial(_their_loss, PolicyLoss(*RANGE.values(), policy_loss_type="gspo")),
        reasons=(Reason("mean log-ratios are bounded at 10 here, as in verl", _has_far_mean),),
    )
    yield Comparison(
        function="PolicyLoss(is_correction clip, token) = correction.importance_weights",
        inputs=random_batches(num_inputs, 33),
        ours=partial(_our_loss, "token_mean", corrected=True),
        theirs=partial(
            _their_loss,
            PolicyLoss(
                *RANGE.values(),
                dual_clip=DUAL,
                is_correction_level="token",
                is_correction_mode="clip",
                is_correction_threshold=(0.0, 2.0),
            ),
        ),
    )
    yield Comparison(
        function="ValueLoss = value_loss.clipped_value_loss",
        inputs=random_batches(num_inputs, 34),
        ours=_our_value_loss,
        theirs=lambda b: ValueLoss(0.5)(
            b.value_BT, b.old_value_BT, b.reward_BT + 1, b.mask_BT.float()
        ),
    )
    for kind in ("k1", "k2", "k3"):
        yield Comparison(
            function=f"compute_approx_kl({kind}) = kl.kl_penalty",
            inputs=random_batches(num_inputs, 35),
            ours=lambda b, kind=kind: kl.kl_penalty(b.logp_BT, b.ref_logp_BT, kind),
            theirs=lambda b, kind=kind: compute_approx_kl(
                b.logp_BT, b.ref_logp_BT, kl_estimator=kind
            ),
            reasons=()
            if kind == "k3"
            else (Reason(f"{kind} is bounded at 10 there, as only k3 is here", _has_far_kl),),
        )
    yield Comparison(
        function="AdaptiveKLController, 100 updates = kl.update",
        inputs=random_batches(num_inputs, 36),
        ours=_our_controller,
        theirs=_their_controller,
    )


def _advantage_comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield those of advantages and returns."""
    estimators = {"rloo": "rloo", "dr_grpo": "grpo", "group_norm": "grpo"}
    for name, ours in estimators.items():
        yield Comparison(
            function=f"compute_advantages_and_returns({name}) = advantage.{ours}",
            inputs=random_batches(num_inputs, 37),
            ours=partial(_our_advantage, name),
            theirs=partial(_their_advantage, name),
            tolerance=1e-4,
            reasons=()
            if name != "group_norm"
            else (
                Reason(
                    "the eps beside the std is 1e-6 here, as in verl, and 1e-9 there: equal "
                    "rewards give 0 here and their rounding there",
                    lambda b: bool((_in_groups(b).std(1) < 1e-2).any()),
                ),
            ),
        )
    yield Comparison(
        function="get_cumulative_returns, no tool tokens = advantage.discounted_sum",
        inputs=random_batches(num_inputs, 38),
        ours=lambda b: advantage.discounted_sum(b.reward_BT, b.gamma),
        theirs=lambda b: RemoteExperienceMaker.get_cumulative_returns(
            None, b.reward_BT, torch.ones(b.mask_BT.shape), b.gamma
        ),
    )
    yield Comparison(
        function="get_advantages_and_returns, no tool tokens = advantage.gae",
        inputs=random_batches(num_inputs, 39),
        ours=lambda b: list(
            advantage.gae(
                b.reward_BT,
                b.value_BT,
                torch.ones(b.mask_BT.shape),
                gamma=b.gamma,
                lam=0.95,
            )
        ),
        theirs=lambda b: list(
            RemoteExperienceMaker.get_advantages_and_returns(
                None, b.value_BT, b.reward_BT, torch.ones(b.mask_BT.shape), b.gamma, 0.95
            )
        ),
    )


def _their_loss(loss: PolicyLoss, batch: RandomBatch) -> list[torch.Tensor]:
    # `value_BT` stands for a difference of the engine's log-probs from the old ones.
    return value_and_gradient(
        batch,
        lambda logp_BT: loss(
            logp_BT,
            batch.old_logp_BT,
            batch.advantage_BT,
            batch.mask_BT.float(),
            rollout_log_probs=batch.old_logp_BT - batch.value_BT,
        )[0],
    )


def _our_loss(mode: str, batch: RandomBatch, *, corrected: bool) -> list[torch.Tensor]:
    weight_BT = batch.mask_BT.float()
    if corrected:
        weight_BT, _ = importance_weights(
            batch.old_logp_BT,
            batch.old_logp_BT - batch.value_BT,
            batch.mask_BT,
            level="token",
            mode="truncated",
            cap=2.0,
        )

    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        tensors = (logp_BT, batch.old_logp_BT, batch.advantage_BT, batch.mask_BT)
        loss_BT, _ = policy_loss.clipped(*tensors, **RANGE, clip_dual=DUAL)
        return policy_loss.aggregate(loss_BT * weight_BT, batch.mask_BT, mode)

    return value_and_gradient(batch, value)


def _our_gspo(batch: RandomBatch) -> list[torch.Tensor]:
    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        tensors = (logp_BT, batch.old_logp_BT, batch.advantage_BT[:, 0], batch.mask_BT)
        loss_BT, _ = policy_loss.gspo(*tensors, **RANGE)
        return policy_loss.aggregate(loss_BT, batch.mask_BT, "seq_mean_token_mean")

    return value_and_gradient(batch, value)


def _has_far_mean(batch: RandomBatch) -> bool:
    gap_BT = torch.where(batch.mask_BT, batch.logp_BT - batch.old_logp_BT, 0.0)
    return float((gap_BT.sum(1) / batch.mask_BT.sum(1).clamp(min=1)).max()) > 10


def _has_far_kl(batch: RandomBatch) -> bool:
    return float((batch.logp_BT - batch.ref_logp_BT).abs().max()) > 20**0.5


def _our_value_loss(batch: RandomBatch) -> torch.Tensor:
    loss_BT, _ = clipped_value_loss(
        batch.value_BT, batch.old_value_BT, batch.reward_BT + 1, batch.mask_BT, clip=0.5
    )
    return policy_loss.aggregate(loss_BT, batch.mask_BT, "token_mean")


def _our_controller(batch: RandomBatch) -> float:
    state = kl.AdaptiveKL(coef=0.1, target=0.5, horizon=10_000)
    for _ in range(100):
        state = kl.update(state, float(batch.value_BT[0, 0].abs()), batch.number)
    return state.coef


def _their_controller(batch: RandomBatch) -> float:
    controller = AdaptiveKLController(0.1, 0.5, 10_000)
    for _ in range(100):
        controller.update(float(batch.value_BT[0, 0].abs()), batch.number)
    return float(controller.value)


def _in_groups(batch: RandomBatch) -> torch.Tensor:
    """Return rewards of groups of three, [G, 3]."""
    return batch.reward_B.repeat(3).view(3, -1).T + batch.value_BT[:, :1] * torch.arange(3) * (
        batch.number % 2
    )


def _our_advantage(name: str, batch: RandomBatch) -> torch.Tensor:
    reward_B = _in_groups(batch).flatten()
    group_B = torch.arange(len(reward_B)) // 3
    if name == "rloo":
        return advantage.rloo(reward_B, group_B)
    return advantage.grpo(reward_B, group_B, norm_by_std=name == "group_norm")


def _their_advantage(name: str, batch: RandomBatch) -> torch.Tensor:
    reward_B = _in_groups(batch).flatten()
    num_rows = len(reward_B)
    experience = SimpleNamespace(
        index=list(range(num_rows)),
        rewards=reward_B,
        kl=torch.zeros(num_rows, 1),
        action_mask=torch.ones(num_rows, 1),
        info={},
    )
    maker = _experience_maker(name)
    maker.compute_advantages_and_returns([experience])
    return experience.advantages[:, 0]


def _experience_maker(name: str) -> RemoteExperienceMaker:
    """Return what `compute_advantages_and_returns` reads of its object."""
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    estimator = SimpleNamespace(estimator=name, gamma=1.0, lambd=1.0, no_std_norm=False)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=3),
            algo=SimpleNamespace(advantage=estimator),
            reward=SimpleNamespace(
                clip_range=None,
                overlong_buffer_len=None,
                stop_properly_penalty_coef=None,
            ),
        )
    )
    maker.advantage_estimator = name
    maker.kl_ctl = SimpleNamespace(value=0.0)
    return maker
