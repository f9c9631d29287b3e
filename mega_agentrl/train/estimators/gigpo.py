"""GiGPO, which compares turns that follow equal answers of a tool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch

from mega_agentrl.algo import gigpo
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
    rows, batch = inputs.rows, inputs.batch
    mask_AL = rows.concat_rows(batch.mask_BT, batch.length_B)
    turn_AL = gigpo.number_turns(mask_AL)
    trajectories, states, num_later = _find_turns(
        rows.concat_rows(batch.response_BT, batch.length_B), turn_AL, inputs.group_A
    )
    advantage_S = gigpo.gigpo(
        inputs.reward_A,
        inputs.group_A,
        torch.tensor(trajectories, dtype=torch.int64),
        torch.tensor(states, dtype=torch.int64),
        torch.tensor(num_later, dtype=torch.int64),
        gamma=gamma,
        weight=weight,
        norm_by_std=norm_by_std,
    )
    num_turns_A = turn_AL.amax(1) + 1
    first_A = num_turns_A.cumsum(0) - num_turns_A
    place_AL = (first_A[:, None] + turn_AL)[mask_AL]
    advantage_AL = advantage_S.new_zeros(mask_AL.shape)
    advantage_AL[mask_AL] = advantage_S[place_AL]
    return AdvantageResult(rows.split_rows(advantage_AL, batch))


def _find_turns(
    token_AL: torch.Tensor, turn_AL: torch.Tensor, group_A: torch.Tensor
) -> tuple[list[int], list[int], list[int]]:
    """Return trajectory, state and number of later turns of each turn, in order.

    The state is the prompt and the tokens between the turn before and this one.
    """
    trajectories: list[int] = []
    states: list[int] = []
    num_later: list[int] = []
    state_numbers: dict[tuple[int, bytes], int] = {}
    for index, (token_L, turn_L) in enumerate(zip(token_AL, turn_AL, strict=True)):
        num_turns = int(turn_L.max()) + 1
        end = 0  # of the turn before
        for turn in range(num_turns):
            place_N = (turn_L == turn).nonzero()
            answer = token_L[end : int(place_N[0])].numpy().tobytes()
            key = (int(group_A[index]), answer)
            trajectories.append(index)
            states.append(state_numbers.setdefault(key, len(state_numbers)))
            num_later.append(num_turns - 1 - turn)
            end = int(place_N[-1]) + 1
    return trajectories, states, num_later
