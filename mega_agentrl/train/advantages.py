"""What the trajectories of a batch earned, token by token, once policy and reference scored it.

    reward   r - kl_coef * sum of KL over the trajectory's tokens      algo.kl_place=reward
    A        the estimator of algo.advantage, within the group of a prompt, or one's own function
    A        + lam * clip(H, -|A| / alpha, |A| / alpha)                algo.egpo.lam > 0
    A_t      that of its trajectory, or shared along the tree's tokens (arpo_hard)
    A_t      * (1 + weight * z of the token's entropy)                 algo.entropy_scale > 0

in this order, by the formulas of `algo/`. reinforce_plus_plus and gae work on tokens from the start
and have each token's KL in that token's reward; gae has a critic's values as well, gives the
returns that the critic learns next, and is whitened under algo.norm_by_std. Entropies and
log-probs are those of the policy's own pass at the sampling temperature; where one is missing it
is an error, never a substitute.

A trajectory counts once, however many rows it is (`TrainBatch.owner_B`): its rows have one
advantage, one sum of KL, one chain of thought and one course of values, read as if they stood in a
line: the value behind a row is that of the next one's first token. A failed one
has no trained token and a group of its own, so it changes nothing.

Suffixes: B rows, A trajectories, T response positions, L those of a whole trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.aepo import entropy_scaled
from mega_agentrl.algo.correction import importance_weights, mismatch
from mega_agentrl.algo.egpo import cot_entropy, cot_mask, egpo
from mega_agentrl.algo.kl import in_reward, kl_penalty
from mega_agentrl.algo.masking import masked_mean, masked_sum, masked_whiten
from mega_agentrl.config.choices import Advantage, Correction, CotBlocks, KlPlace
from mega_agentrl.train.own_advantage import own_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.algo_schema import AlgoConfig, EgpoConfig
    from mega_agentrl.types.batch import TrainBatch

Markers = tuple[tuple[int, ...], tuple[int, ...]]

CORRECTION_MODES = {"truncate": "truncated", "mask": "masked"}


def add_corrections(batch: TrainBatch, algo: AlgoConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `correction_BT` from the engine's and the policy's log-probs, as algo.correction says.

    Metrics: `correction/weight_mean` after the cap, `correction/capped` share of trained tokens;
    none, and the batch as it was, without a correction. See `mismatch_metrics` for the causes.
    """
    if algo.correction is Correction.none:
        return batch, {}
    level, _, rule = algo.correction.partition("_")
    weight_BT, info = importance_weights(
        _needed(batch, "old_logp_BT", f"algo.correction={algo.correction}"),
        batch.rollout_logp_BT,
        batch.mask_BT,
        level=level,
        mode=CORRECTION_MODES[rule],
        cap=algo.correction_cap,
    )
    metrics = {f"correction/{name}": float(info[name]) for name in ("weight_mean", "capped")}
    return batch.with_fields(correction_BT=weight_BT), metrics


def mismatch_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far what the engine said of tokens is from the policy's, over trained tokens.

    Those of `algo.correction.mismatch`, of log-probs and probabilities, and the absolute
    difference of the entropies in nats, mean and max, all under `mismatch/`.
    """
    assert batch.old_logp_BT is not None and batch.entropy_BT is not None
    mask_BT = batch.mask_BT
    gap_BT = (batch.rollout_entropy_BT - batch.entropy_BT).abs().masked_fill(~mask_BT, 0.0)
    figures = mismatch(batch.old_logp_BT, batch.rollout_logp_BT, mask_BT)
    return {f"mismatch/{name}": float(value) for name, value in figures.items()} | {
        "mismatch/entropy_mean_abs": float(masked_mean(gap_BT, mask_BT)),
        "mismatch/entropy_max_abs": float(gap_BT.max()),
    }


def add_advantages(
    batch: TrainBatch, algo: AlgoConfig, *, kl_coef: float, markers: Markers | None
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill `advantage_BT` [B, T] float32, 0 where nothing is trained on, with gae `return_BT` too.

    kl_coef: of a KL in the reward, in place of algo.kl_coef, from which it may have moved.
    markers: token ids that open and close the chain of thought; not read without EGPO.
    Metrics over trained tokens: `advantage/mean_abs`, `advantage/zero` (share), with a KL in the
    reward `advantage/kl` (nats per token), with AEPO's scale `aepo/flipped` (share of changed
    signs); over trajectories with EGPO `egpo/cot_entropy` (nats), `egpo/without_cot` (share that
    has no chain of thought), `egpo/bonus` (what was added) and `egpo/clipped` (share where the
    bound was lower than the entropy). Raises `ValueError` for a field that is missing.
    """
    mask_BT, owners = batch.mask_BT, _Owners.of(batch)
    kl_BT, metrics = None, {}
    if algo.kl_place is KlPlace.reward and algo.kl_coef > 0:
        why = "algo.kl_place=reward"
        logp_BT, ref_BT = _needed(batch, "old_logp_BT", why), _needed(batch, "ref_logp_BT", why)
        kl_BT = kl_penalty(logp_BT, ref_BT, algo.kl_kind).masked_fill(~mask_BT, 0.0)
        metrics["advantage/kl"] = float(masked_mean(kl_BT, mask_BT))
    if algo.is_own:
        advantage_BT = own_advantage(batch, algo)
    elif algo.advantage is Advantage.gae:
        assert not algo.egpo.lam, "check_algo lets EGPO change trajectories' advantages only"
        advantage_BT, return_BT = _over_values(batch, owners, kl_BT, kl_coef, algo)
        batch = batch.with_fields(return_BT=return_BT)
    elif algo.advantage is Advantage.reinforce_plus_plus:
        assert not algo.egpo.lam, "check_algo lets EGPO change trajectories' advantages only"
        reward_BT = _token_rewards(batch, owners, kl_BT, kl_coef)
        advantage_BT = estimators.reinforce_plus_plus(reward_BT, mask_BT)
    else:
        reward_A = batch.reward_B[owners.first_A]
        if kl_BT is not None:
            reward_A = reward_A - kl_coef * owners.total(masked_sum(kl_BT, mask_BT, 1))
        advantage_A = _estimate(batch, owners, reward_A, algo)
        if algo.egpo.lam:
            advantage_A, figures = _with_egpo(batch, owners, advantage_A, algo.egpo, markers)
            metrics |= figures
        advantage_BT = _on_tokens(batch, advantage_A[owners.of_B], algo)
    if algo.entropy_scale:
        entropy_BT = _needed(batch, "entropy_BT", f"algo.entropy_scale={algo.entropy_scale}")
        before_BT, weight = advantage_BT, algo.entropy_scale
        advantage_BT = entropy_scaled(before_BT, entropy_BT, mask_BT, weight=weight)
        metrics["aepo/flipped"] = _share(before_BT * advantage_BT < 0, mask_BT)
    metrics["advantage/mean_abs"] = float(masked_mean(advantage_BT.abs(), mask_BT))
    metrics["advantage/zero"] = _share(advantage_BT == 0, mask_BT)
    return batch.with_fields(advantage_BT=advantage_BT.float()), metrics


@dataclass(frozen=True, slots=True)
class _Owners:
    """Which rows are one trajectory. first_A: its first row. of_B: its number, for each row."""

    first_A: torch.Tensor
    of_B: torch.Tensor
    alone: bool

    @classmethod
    def of(cls, batch: TrainBatch) -> _Owners:
        """Trajectories in the order of their first rows."""
        if batch.owner_B is None:
            every_B = torch.arange(batch.num_rows)
            return cls(every_B, every_B, alone=True)
        first: dict[int, int] = {}
        for row, owner in enumerate(batch.owner_B.tolist()):
            first.setdefault(owner, row)
        place = {owner: number for number, owner in enumerate(first)}
        of_B = torch.tensor([place[owner] for owner in batch.owner_B.tolist()])
        return cls(torch.tensor(list(first.values())), of_B, alone=False)

    def total(self, value_B: torch.Tensor) -> torch.Tensor:
        """[A] the sum over a trajectory's rows."""
        return value_B.new_zeros(len(self.first_A)).index_add(0, self.of_B, value_B)

    def behind(self, value_B: torch.Tensor) -> torch.Tensor:
        """[B] the sum over the later rows of the same trajectory."""
        if self.alone:
            return torch.zeros_like(value_B)
        so_far = [0.0] * len(self.first_A)
        sums: list[float] = []
        for place, value in zip(self.of_B.flip(0).tolist(), value_B.flip(0).tolist(), strict=True):
            sums.append(so_far[place])
            so_far[place] += value
        return value_B.new_tensor(sums).flip(0)

    def joined(self, grid_BT: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
        """[A, L] the rows of each trajectory in a line, one position of zeros behind each."""
        if self.alone:
            return grid_BT
        pieces: list[list[torch.Tensor]] = [[] for _ in self.first_A]
        for row, place in enumerate(self.of_B.tolist()):
            pieces[place].append(pad(grid_BT[row, : int(length_B[row])], (0, 1)))
        return pad_sequence([torch.cat(rows) for rows in pieces], batch_first=True)

    def apart(self, grid_AL: torch.Tensor, like: TrainBatch) -> torch.Tensor:
        """[B, T] the rows of what `joined` put in a line; 0 behind their ends."""
        if self.alone:
            return grid_AL
        grid_BT = grid_AL.new_zeros(like.response_BT.shape)
        start = [0] * len(self.first_A)
        lengths = like.length_B.tolist()
        for row, place in enumerate(self.of_B.tolist()):
            stop = start[place] + lengths[row]
            grid_BT[row, : lengths[row]] = grid_AL[place, start[place] : stop]
            start[place] = stop + 1
        return grid_BT


def _estimate(
    batch: TrainBatch, owners: _Owners, reward_A: torch.Tensor, algo: AlgoConfig
) -> torch.Tensor:
    """[A] advantage of each trajectory."""
    group_A = batch.group_B[owners.first_A]
    kind = Advantage(algo.advantage)
    match kind:
        case Advantage.grpo | Advantage.arpo_hard:
            return estimators.grpo(reward_A, group_A, norm_by_std=algo.norm_by_std)
        case Advantage.rloo:
            return estimators.rloo(reward_A, group_A)
        case Advantage.remax:
            return _over_greedy(batch, owners, reward_A)
        case Advantage.reinforce_plus_plus_baseline:
            # The mean of a group is over its trajectories, the whitening over tokens of all rows.
            centred_A = estimators.grpo(reward_A, group_A, norm_by_std=False)
            grid_BT = estimators.broadcast(centred_A[owners.of_B], batch.mask_BT)
            white_BT = masked_whiten(grid_BT, batch.mask_BT)
            num_A = owners.total(batch.mask_BT.sum(1)).clamp(min=1)
            return owners.total(masked_sum(white_BT, batch.mask_BT, 1)) / num_A
        case Advantage.reinforce_plus_plus | Advantage.gae:
            raise AssertionError(f"{algo.advantage} has no advantage of whole trajectories")
        case _:
            assert_never(kind)


def _over_greedy(batch: TrainBatch, owners: _Owners, reward_A: torch.Tensor) -> torch.Tensor:
    """[A] the reward over the greedy answer's, or where that failed over the others' mean.

    Either baseline is independent of what the trajectory itself did.
    """
    if batch.baseline_B is None:
        raise ValueError(
            "baseline_B: got None, expected the rewards of greedy answers with "
            "algo.advantage=remax; probable cause: groups that were collected without them"
        )
    greedy_A = batch.baseline_B[owners.first_A]
    others_A = reward_A - estimators.rloo(reward_A, batch.group_B[owners.first_A])
    return estimators.remax(reward_A, torch.where(greedy_A.isnan(), others_A, greedy_A))


def _over_values(
    batch: TrainBatch,
    owners: _Owners,
    kl_BT: torch.Tensor | None,
    kl_coef: float,
    algo: AlgoConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] advantage and [B, T] return; the last trained token of a trajectory has its reward."""
    if batch.value_BT is None:
        raise ValueError(
            "value_BT: got None, expected a critic's values with algo.advantage=gae; probable "
            "cause: a batch that no critic has seen"
        )
    mask_AL = owners.joined(batch.mask_BT, batch.length_B)
    value_AL = owners.joined(batch.value_BT, batch.length_B)
    reward_A = batch.reward_B[owners.first_A]
    last_A = mask_AL.size(1) - 1 - mask_AL.flip(1).int().argmax(1)
    reward_AL = torch.zeros_like(value_AL).scatter(1, last_A.unsqueeze(1), reward_A.unsqueeze(1))
    if kl_BT is not None:
        kl_AL = owners.joined(kl_BT, batch.length_B)
        reward_AL = in_reward(reward_AL, kl_AL, mask_AL, coef=kl_coef)
    advantage_AL, return_AL = estimators.gae(
        reward_AL, value_AL, mask_AL, gamma=algo.gamma, lam=algo.lam
    )
    advantage_BT = owners.apart(advantage_AL, batch)
    if algo.norm_by_std:
        advantage_BT = masked_whiten(advantage_BT, batch.mask_BT)
    return advantage_BT, owners.apart(return_AL, batch).float()


def _on_tokens(batch: TrainBatch, advantage_B: torch.Tensor, algo: AlgoConfig) -> torch.Tensor:
    """[B, T] the trajectory's advantage, or with arpo_hard the mean of those that share a token."""
    if algo.advantage is Advantage.arpo_hard:
        return estimators.arpo_hard(advantage_B, batch.node_BT, batch.mask_BT)
    return estimators.broadcast(advantage_B, batch.mask_BT)


def _token_rewards(
    batch: TrainBatch, owners: _Owners, kl_BT: torch.Tensor | None, kl_coef: float
) -> torch.Tensor:
    """[B, T] what each token earned; undiscounted sums from the right are the returns.

    A row's last trained token has the trajectory's reward, less the KL of the rows behind it.
    """
    mask_BT, reward_B = batch.mask_BT, batch.reward_B
    if kl_BT is not None:
        reward_B = reward_B - kl_coef * owners.behind(masked_sum(kl_BT, mask_BT, 1))
    last_B = mask_BT.size(1) - 1 - mask_BT.flip(1).int().argmax(1)
    empty_BT = torch.zeros_like(batch.rollout_logp_BT)
    reward_BT = empty_BT.scatter(1, last_B.unsqueeze(1), reward_B.unsqueeze(1))
    if kl_BT is None:
        return reward_BT
    return in_reward(reward_BT, kl_BT, mask_BT, coef=kl_coef)


def _with_egpo(
    batch: TrainBatch,
    owners: _Owners,
    advantage_A: torch.Tensor,
    settings: EgpoConfig,
    markers: Markers | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """[A] the advantage with EGPO's bonus, and its metrics."""
    grid_BT = _needed(batch, "entropy_BT", f"algo.egpo.lam={settings.lam}")
    mask_AL = owners.joined(batch.mask_BT, batch.length_B)
    cot_AL = mask_AL
    if settings.blocks is not CotBlocks.response:
        if markers is None:
            raise ValueError(
                f"add_advantages: got no markers with algo.egpo.blocks={settings.blocks}; expected "
                "the token ids of algo.egpo.markers; probable cause: nobody asked the tokenizer"
            )
        token_AL = owners.joined(batch.response_BT, batch.length_B)
        start, end = markers
        cot_AL = cot_mask(
            token_AL, mask_AL, start_id=start, end_id=end, blocks=str(settings.blocks)
        )
    entropy_A = cot_entropy(owners.joined(grid_BT, batch.length_B), cot_AL)
    with_A = egpo(advantage_A, entropy_A, lam=settings.lam, alpha=settings.alpha)
    trained_A = mask_AL.any(1)
    bounded_A = entropy_A > advantage_A.abs() / settings.alpha
    return with_A, {
        "egpo/cot_entropy": float(masked_mean(entropy_A, trained_A)),
        "egpo/without_cot": _share(~cot_AL.any(1), trained_A),
        "egpo/bonus": float(masked_mean(with_A - advantage_A, trained_A)),
        "egpo/clipped": _share(bounded_A, trained_A),
    }


def _share(there: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(there.float(), mask))


def _needed(batch: TrainBatch, name: str, why: str) -> torch.Tensor:
    """A field that the log-prob pass fills."""
    value: torch.Tensor | None = getattr(batch, name)
    if value is None:
        raise ValueError(
            f"{name}: got None, expected the values of the log-prob pass with {why}; probable "
            "cause: add_logprobs was left out, or ran without a reference"
        )
    return value
