"""Estimators that compare turns which follow equal answers of a tool: GiGPO and HGPO.

Shape suffixes: A trajectories, L positions of a whole trajectory, S turns of all trajectories, K
depths of common history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from mega_agentrl.algo import gigpo, hgpo
from mega_agentrl.algo.masking import number_turns
from mega_agentrl.config.ranges import Range
from mega_agentrl.train.estimators.registry import AdvantageResult, register_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.estimators.registry import AdvantageInputs


@register_advantage("gigpo", needs_groups=True, supports_kl_in_reward=True)
def _gigpo(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    gamma: Annotated[float, Range(at_least=0, at_most=1)] = 0.95,
    weight: Annotated[float, Range(at_least=0, at_most=1000)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """GiGPO, relative to the group and to other turns after the same answer (arXiv 2505.10978).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        gamma: Discount factor per turn.
        weight: Weight of the comparison between turns.
        norm_by_std: Divide by the standard deviations.
    """
    turns = _Turns.from_batch(inputs)
    advantage_S = gigpo.gigpo(
        inputs.reward_A,
        inputs.group_A,
        turns.trajectory_S,
        turns.state_S,
        turns.num_later_S,
        gamma=gamma,
        weight=weight,
        norm_by_std=norm_by_std,
    )
    return turns.to_tokens(inputs, advantage_S)


@register_advantage("hgpo", needs_groups=True, supports_kl_in_reward=True)
def _hgpo(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    gamma: Annotated[float, Range(at_least=0, at_most=1)] = 0.95,
    history: Annotated[int, Range(at_least=0, at_most=1000)] = 2,
    exact_history: bool = True,
    weight_power: Annotated[float, Range(at_least=0, at_most=10)] = 1.0,
    norm_by_std: bool = False,
) -> AdvantageResult:
    """HGPO, relative to turns after the same answers, by depth of history (arXiv 2602.22817).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        gamma: Discount factor per turn.
        history: Number of earlier answers that the deepest comparison of the paper looks at.
        exact_history: Compare at one more depth turns with the same tokens before them, as those
            right after a fork, where the comparison is exact; false is the paper.
        weight_power: Power of the weights of the depths.
        norm_by_std: Divide by the standard deviations.
    """
    turns = _Turns.from_batch(inputs)
    depths = turns.contexts(history)
    if exact_history:
        depths.append(turns.history_S)
    return_S = inputs.reward_A[turns.trajectory_S] * gamma**turns.num_later_S
    advantage_S = hgpo.hgpo(
        return_S.to(inputs.reward_A.dtype),
        torch.stack(depths),
        weight_power=weight_power,
        norm_by_std=norm_by_std,
    )
    return turns.to_tokens(inputs, advantage_S)


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of all trajectories, in order."""

    turn_AL: torch.Tensor
    """[A, L] number of each trained token's turn in its trajectory, -1 elsewhere."""
    trajectory_S: torch.Tensor
    """[S] trajectory of each turn."""
    num_later_S: torch.Tensor
    """[S] number of later turns of the same trajectory."""
    state_S: torch.Tensor
    """[S] state before the turn: the prompt, and the tokens between the turn before and this one.
    """
    history_S: torch.Tensor
    """[S] the prompt and all tokens before the turn."""

    @classmethod
    def from_batch(cls, inputs: AdvantageInputs) -> _Turns:
        """Find the turns; equal tokens of one prompt have equal numbers."""
        rows, batch = inputs.rows, inputs.batch
        turn_AL = number_turns(rows.concat_rows(batch.mask_BT, batch.length_B))
        token_AL = rows.concat_rows(batch.response_BT, batch.length_B)
        states: dict[tuple[int, bytes], int] = {}
        histories: dict[tuple[int, bytes], int] = {}
        turns: list[tuple[int, int, int, int]] = []
        for index, (token_L, turn_L) in enumerate(zip(token_AL, turn_AL, strict=True)):
            num_turns = int(turn_L.max()) + 1
            # A history is the previous one plus the tokens since, so each token is read once.
            start = end = 0
            history = ~int(inputs.group_A[index])  # of the prompt
            for turn in range(num_turns):
                position_N = (turn_L == turn).nonzero()
                first = int(position_N[0])
                state_key = (int(inputs.group_A[index]), token_L[end:first].numpy().tobytes())
                history_key = (history, token_L[start:first].numpy().tobytes())
                history = histories.setdefault(history_key, len(histories))
                state = states.setdefault(state_key, len(states))
                turns.append((index, num_turns - 1 - turn, state, history))
                start, end = first, int(position_N[-1]) + 1
        table_S4 = torch.tensor(turns, dtype=torch.int64).reshape(-1, 4)
        return cls(turn_AL, *table_S4.unbind(1))

    def contexts(self, history: int) -> list[torch.Tensor]:
        """Return what turns have in common at depths 0 to `history`, each [S].

        At depth k it is the last k + 1 states; -1 where a turn has fewer.
        """
        depths = [self.state_S]
        for depth in range(1, history + 1):
            earlier_S = self.state_S.roll(depth)
            is_same_S = self.trajectory_S.roll(depth) == self.trajectory_S
            is_same_S[:depth] = False
            pair_S2 = torch.stack((depths[-1], earlier_S), 1)
            _, number_S = torch.unique(pair_S2, dim=0, return_inverse=True)
            depths.append(number_S.where(is_same_S, -1))
        return depths

    def to_tokens(self, inputs: AdvantageInputs, advantage_S: torch.Tensor) -> AdvantageResult:
        """Return the advantage of each token's turn."""
        num_turns_A = self.turn_AL.amax(1) + 1
        first_A = num_turns_A.cumsum(0) - num_turns_A
        mask_AL = self.turn_AL >= 0
        advantage_AL = advantage_S.new_zeros(mask_AL.shape)
        advantage_AL[mask_AL] = advantage_S[(first_A[:, None] + self.turn_AL)[mask_AL]]
        return AdvantageResult(inputs.rows.split_rows(advantage_AL, inputs.batch))
