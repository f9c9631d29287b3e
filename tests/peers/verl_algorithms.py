"""verl's advantages, losses, KL, corrections and controllers (`verl.trainer.ppo`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
)
from verl.utils.torch_functional import masked_whiten as verl_whiten
from verl.workers.config import ActorConfig

from mega_agentrl.algo import advantage, kl, policy_loss
from mega_agentrl.algo.correction import importance_weights, logprob_mismatch
from mega_agentrl.algo.masking import masked_whiten
from mega_agentrl.algo.value_loss import clipped_value_loss
from tests.peers.comparison import Comparison, Reason
from tests.peers.losses import DUAL, LONGEST, RANGE, our_loss, value_and_gradient
from tests.peers.random_batches import RandomBatch, random_batches, with_one_advantage_per_row

MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_sum_norm": "seq-mean-token-sum-norm",
}
SINGLE_TOKEN = Reason(
    "one token cannot be whitened: 0 here, an exception there", lambda batch: batch.num_tokens == 1
)


def _all_returns_are_equal(batch: RandomBatch) -> bool:
    """Return whether all tokens of the batch have one return, so that its std is 0."""
    return_BT = batch.reward_BT.flip(1).cumsum(1).flip(1)[batch.mask_BT]
    return bool(return_BT.amax() - return_BT.amin() < 1e-6)


EQUAL_RETURNS = Reason(
    "equal returns give exactly 0 here; there the rounding of their mean is divided by 1e-4",
    _all_returns_are_equal,
)
NOTHING_TO_COMPARE = Reason(
    "equal rewards give exactly 0 here; there the rounding of their mean is divided by 1e-4",
    lambda batch: bool(
        (advantage.grpo(batch.reward_B, batch.group_B, norm_by_std=False)[batch.mask_BT.any(1)])
        .diff()
        .abs()
        .le(1e-6)
        .all()
    ),
)


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield all comparisons."""
    yield from _advantages(num_inputs)
    yield from _losses(num_inputs)
    yield from _others(num_inputs)


def _with_reward_last(batch: RandomBatch) -> torch.Tensor:
    """Return the rewards of the rows on the first position, [B, T]: verl sums over positions."""
    reward_BT = torch.zeros(batch.mask_BT.shape)
    reward_BT[:, 0] = batch.reward_B
    return reward_BT


def _by_group(function: Callable, batch: RandomBatch, **options: object) -> torch.Tensor:
    advantage_BT, _ = function(
        _with_reward_last(batch), batch.mask_BT.float(), batch.group_B.numpy(), **options
    )
    return advantage_BT


def _advantages(num_inputs: int) -> Iterator[Comparison]:
    for norm_by_std in (True, False):
        yield Comparison(
            function=f"compute_grpo_outcome_advantage(std={norm_by_std}) = advantage.grpo",
            inputs=random_batches(num_inputs, 1),
            ours=lambda b, n=norm_by_std: advantage.broadcast(
                advantage.grpo(b.reward_B, b.group_B, norm_by_std=n), b.mask_BT
            ),
            theirs=lambda b, n=norm_by_std: _by_group(
                core_algos.compute_grpo_outcome_advantage, b, norm_adv_by_std_in_grpo=n
            ),
            tolerance=1e-3 if norm_by_std else 1e-5,
        )
    yield Comparison(
        function="compute_rloo_outcome_advantage = advantage.rloo",
        inputs=random_batches(num_inputs, 2),
        ours=lambda b: advantage.broadcast(advantage.rloo(b.reward_B, b.group_B), b.mask_BT),
        theirs=partial(_by_group, core_algos.compute_rloo_outcome_advantage),
    )
    yield Comparison(
        function="compute_reinforce_plus_plus_outcome_advantage = advantage.reinforce_plus_plus",
        inputs=random_batches(num_inputs, 3),
        ours=lambda b: advantage.reinforce_plus_plus(b.reward_BT, b.mask_BT, gamma=b.gamma),
        theirs=lambda b: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            b.reward_BT, b.mask_BT.float(), SimpleNamespace(gamma=b.gamma)
        )[0],
        reasons=(SINGLE_TOKEN, EQUAL_RETURNS),
    )
    yield Comparison(
        function="compute_reinforce_plus_plus_baseline_outcome_advantage = "
        "advantage.reinforce_plus_plus_baseline",
        inputs=random_batches(num_inputs, 4),
        ours=lambda b: advantage.reinforce_plus_plus_baseline(b.reward_B, b.group_B, b.mask_BT),
        theirs=partial(
            _by_group, core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
        ),
        reasons=(SINGLE_TOKEN, NOTHING_TO_COMPARE),
    )
    yield Comparison(
        function="compute_remax_outcome_advantage = advantage.remax",
        inputs=random_batches(num_inputs, 5),
        ours=lambda b: advantage.broadcast(
            advantage.remax((b.reward_BT * b.mask_BT).sum(1), b.old_value_BT[:, 0]),
            _first_tokens(b),
        ),
        theirs=lambda b: (
            core_algos.compute_remax_outcome_advantage(
                b.reward_BT, b.old_value_BT[:, 0], b.mask_BT.float()
            )[0]
            * _first_tokens(b)
        ),
    )
    for lam in (1.0, 0.95):
        yield Comparison(
            function=f"compute_gae_advantage_return(lam={lam}) = advantage.gae, masked_whiten",
            inputs=random_batches(num_inputs, 6),
            ours=partial(_our_gae, lam),
            theirs=partial(_verl_gae, lam),
            reasons=(SINGLE_TOKEN,),
        )
    yield Comparison(
        function="masked_whiten = masking.masked_whiten",
        inputs=random_batches(num_inputs, 7),
        ours=lambda b: masked_whiten(b.value_BT, b.mask_BT),
        theirs=lambda b: verl_whiten(b.value_BT, b.mask_BT.float()) * b.mask_BT,
        reasons=(SINGLE_TOKEN,),
    )


def _first_tokens(batch: RandomBatch) -> torch.Tensor:
    """Return the first unmasked token of each row, whose return is the row's reward, [B, T]."""
    return batch.mask_BT & (batch.mask_BT.cumsum(1) == 1)


def _our_gae(lam: float, batch: RandomBatch) -> list[torch.Tensor]:
    advantage_BT, return_BT = advantage.gae(
        batch.reward_BT, batch.value_BT, batch.mask_BT, gamma=batch.gamma, lam=lam
    )
    return [masked_whiten(advantage_BT, batch.mask_BT), return_BT]


def _verl_gae(lam: float, batch: RandomBatch) -> list[torch.Tensor]:
    advantage_BT, return_BT = core_algos.compute_gae_advantage_return(
        batch.reward_BT, batch.value_BT, batch.mask_BT.float(), batch.gamma, lam
    )
    return [advantage_BT * batch.mask_BT, return_BT * batch.mask_BT]


def _losses(num_inputs: int) -> Iterator[Comparison]:
    ours = {
        "vanilla": partial(our_loss, loss_of=policy_loss.clipped, clip_dual=DUAL, **RANGE),
        "gspo": partial(our_loss, loss_of=policy_loss.gspo, by_row=True, **RANGE),
        "cispo": partial(our_loss, loss_of=policy_loss.cispo, **RANGE),
    }
    for seed, (loss, function) in enumerate(ours.items(), start=11):
        for mode, verl_mode in MODES.items():
            batches = random_batches(num_inputs // 2, seed)
            yield Comparison(
                function=f"compute_policy_loss_{loss}({verl_mode}), weighted, with gradient = "
                f"policy_loss.{ours[loss].keywords['loss_of'].__name__}",
                inputs=map(with_one_advantage_per_row, batches) if loss == "gspo" else batches,
                ours=partial(function, mode=mode),
                theirs=partial(_verl_loss, core_algos.get_policy_loss_fn(loss), verl_mode),
            )
    for mode, verl_mode in MODES.items():
        yield Comparison(
            function=f"agg_loss({verl_mode}) of two shards = policy_loss.aggregate",
            inputs=random_batches(num_inputs, 14),
            ours=partial(_our_shards, mode),
            theirs=partial(_verl_shards, verl_mode),
        )
    yield Comparison(
        function="compute_value_loss = value_loss.clipped_value_loss",
        inputs=random_batches(num_inputs, 15),
        ours=_our_value_loss,
        theirs=lambda b: list(
            core_algos.compute_value_loss(
                b.value_BT, b.reward_BT + 1, b.old_value_BT, b.mask_BT.float(), 0.5
            )
        ),
    )


def _actor_config(mode: str) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=RANGE["clip_low"],
        clip_ratio_high=RANGE["clip_high"],
        clip_ratio_c=DUAL,
        loss_agg_mode=mode,
    )
    config.global_batch_info["loss_scale_factor"] = LONGEST
    return config


def _verl_loss(function: Callable, mode: str, batch: RandomBatch) -> list[torch.Tensor]:
    config = _actor_config(mode)

    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        loss, _ = function(
            batch.old_logp_BT,
            logp_BT,
            batch.advantage_BT,
            batch.mask_BT.float(),
            mode,
            config,
            batch.weight_BT,
        )
        return loss

    return value_and_gradient(batch, value)


def _shards(batch: RandomBatch) -> tuple[slice, slice]:
    cut = batch.number % (len(batch.reward_B) + 1)
    return slice(0, cut), slice(cut, None)


def _our_shards(mode: str, batch: RandomBatch) -> torch.Tensor:
    denominator = policy_loss.loss_denominator(batch.mask_BT, mode, max_response_tokens=LONGEST)
    return sum(
        policy_loss.aggregate(
            batch.advantage_BT[rows], batch.mask_BT[rows], mode, denominator=denominator
        )
        for rows in _shards(batch)
    )


def _verl_shards(mode: str, batch: RandomBatch) -> torch.Tensor:
    """Return the mean over two ranks, as their gradients are averaged."""
    return sum(
        core_algos.agg_loss(
            batch.advantage_BT[rows],
            batch.mask_BT[rows].float(),
            mode,
            dp_size=2,
            batch_num_tokens=batch.num_tokens,
            global_batch_size=int(batch.mask_BT.any(1).sum()),
            loss_scale_factor=LONGEST,
        )
        / 2
        for rows in _shards(batch)
    )


def _our_value_loss(batch: RandomBatch) -> list[torch.Tensor]:
    loss_BT, info = clipped_value_loss(
        batch.value_BT, batch.old_value_BT, batch.reward_BT + 1, batch.mask_BT, clip=0.5
    )
    loss = policy_loss.aggregate(loss_BT, batch.mask_BT, "token_mean")
    return [loss, info["value_clipfrac"]]


def _others(num_inputs: int) -> Iterator[Comparison]:
    for kind in ("k1", "abs", "k2", "k3"):
        yield Comparison(
            function=f"kl_penalty({kind}), with gradient = kl.kl_penalty",
            inputs=random_batches(num_inputs, 21),
            ours=lambda b, kind=kind: value_and_gradient(
                b, lambda logp_BT: kl.kl_penalty(logp_BT, b.ref_logp_BT, kind).sum()
            ),
            theirs=lambda b, kind=kind: value_and_gradient(
                b, lambda logp_BT: core_algos.kl_penalty(logp_BT, b.ref_logp_BT, kind).sum()
            ),
        )
    yield Comparison(
        function="AdaptiveKLController, 100 updates = kl.update",
        inputs=random_batches(num_inputs, 22),
        ours=lambda b: _controlled(b, "ours"),
        theirs=lambda b: _controlled(b, "theirs"),
    )
    for level in ("token", "sequence"):
        for mode, threshold in (("truncated", 2.0), ("masked", "1e-12_2")):
            yield Comparison(
                function=f"compute_rollout_correction_weights({level}, {mode}) = "
                "correction.importance_weights",
                inputs=random_batches(num_inputs, 23),
                ours=partial(_our_weights, level, mode),
                theirs=lambda b, level=level, threshold=threshold: (
                    compute_rollout_correction_weights(
                        b.logp_BT - b.old_logp_BT, b.mask_BT.float(), level, threshold
                    )[0]
                ),
                reasons=(ALL_MASKED[level],) if mode == "masked" else (),
            )
    yield Comparison(
        function="compute_offpolicy_metrics(kl, k3_kl) = correction.logprob_mismatch",
        inputs=random_batches(num_inputs, 24),
        ours=lambda b: _mismatch(b, logprob_mismatch, ("kl_k1", "kl_k3")),
        theirs=lambda b: _mismatch(b, compute_offpolicy_metrics, ("kl", "k3_kl")),
        reasons=(
            Reason(
                "log-ratios are bounded at 20 here",
                lambda b: float((b.logp_BT - b.old_logp_BT)[b.mask_BT].max()) > 20,
            ),
        ),
        tolerance=1e-4,
    )


def _our_weights(level: str, mode: str, batch: RandomBatch) -> torch.Tensor:
    weight_BT, _ = importance_weights(
        batch.logp_BT, batch.old_logp_BT, batch.mask_BT, level=level, mode=mode, cap=2.0
    )
    return weight_BT


ALL_MASKED = {
    level: Reason(
        "all weights may be 0 here; there their effective sample size divides by 0",
        lambda batch, level=level: not bool(_our_weights(level, "masked", batch).any()),
    )
    for level in ("token", "sequence")
}


def _controlled(batch: RandomBatch, whose: str) -> list[float]:
    observed = batch.value_BT.flatten().abs().tolist()
    state = kl.AdaptiveKL(coef=0.1, target=0.5, horizon=10_000)
    peer = core_algos.AdaptiveKLController(0.1, 0.5, 10_000)
    for step in range(100):
        state = kl.update(state, observed[step % len(observed)], batch.number)
        peer.update(observed[step % len(observed)], batch.number)
    return [state.coef if whose == "ours" else float(peer.value)]


def _mismatch(batch: RandomBatch, function: Callable, names: tuple[str, ...]) -> list[float]:
    mask_BT = batch.mask_BT if function is logprob_mismatch else batch.mask_BT.float()
    metrics = function(batch.logp_BT, batch.old_logp_BT, mask_BT)
    return [float(metrics[name]) for name in names]
