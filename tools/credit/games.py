"""Turn-based games whose true values, advantages and policy gradients are computed exactly.

A game has D turns. In each the policy chooses an action, and the tool answers at random. The state
is the whole history, so states form a tree, and nothing is approximated: values follow from the
last turn backwards. A trajectory samples one token a turn, its action, and reads one, the answer.

S states of a turn, A actions, O answers. The state after action a and answer o in state s is
(s * A + a) * O + o.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Game:
    """A game and a policy in it."""

    name: str
    policy_DSA: list[np.ndarray]
    """Probability of each action, [S, A] a turn."""
    answer_DSAO: list[np.ndarray]
    """Probability of each answer, [S, A, O] a turn."""
    reward_S: np.ndarray
    """[S] expected reward of each final history, from 0 to 1; rewards are 0 or 1."""

    @property
    def num_turns(self) -> int:
        """Number of turns D."""
        return len(self.policy_DSA)

    @cached_property
    def value_DS(self) -> list[np.ndarray]:
        """Expected reward in each state, [S] a turn, and of the final histories."""
        values = [self.reward_S]
        for turn in range(self.num_turns - 1, -1, -1):
            values.append((self.policy_DSA[turn] * self._q_values(turn, values[-1])).sum(1))
        return values[::-1]

    @cached_property
    def advantage_DSA(self) -> list[np.ndarray]:
        """True advantage of each action, [S, A] a turn."""
        return [
            self._q_values(turn, self.value_DS[turn + 1]) - self.value_DS[turn][:, None]
            for turn in range(self.num_turns)
        ]

    @cached_property
    def visits_DS(self) -> list[np.ndarray]:
        """Probability of each state, [S] a turn."""
        visits = [np.ones(1)]
        for policy_SA, answer_SAO in zip(self.policy_DSA, self.answer_DSAO, strict=True):
            visits.append((visits[-1][:, None, None] * policy_SA[..., None] * answer_SAO).ravel())
        return visits

    @cached_property
    def gradient(self) -> np.ndarray:
        """Gradient of the expected reward by the logits of all states and actions, flat."""
        return np.concatenate(
            [
                (visits_S[:, None] * policy_SA * advantage_SA).ravel()
                for visits_S, policy_SA, advantage_SA in zip(
                    self.visits_DS, self.policy_DSA, self.advantage_DSA, strict=False
                )
            ]
        )

    def greedy_value(self) -> float:
        """Return the expected reward of the most probable actions."""
        value_S = self.reward_S
        for turn in range(self.num_turns - 1, -1, -1):
            q_SA = self._q_values(turn, value_S)
            value_S = np.take_along_axis(
                q_SA, self.policy_DSA[turn].argmax(1)[:, None], axis=1
            ).squeeze(1)
        return float(value_S[0])

    def _q_values(self, turn: int, next_value_S: np.ndarray) -> np.ndarray:
        answer_SAO = self.answer_DSAO[turn]
        return (answer_SAO * next_value_S.reshape(answer_SAO.shape)).sum(2)


def make_game(
    name: str,
    reward: Callable[[list[tuple[int, int]]], float],
    *,
    num_turns: int = 4,
    num_actions: int = 3,
    answer_probabilities: tuple[float, ...] = (1.0,),
    seed: int = 0,
) -> Game:
    """Return a game with a random policy; the seed fixes its logits, of standard deviation 0.5.

    Args:
        name: Name of the game.
        reward: Function of the history, the (action, answer) of each turn.
        num_turns: Number of turns.
        num_actions: Number of actions a turn.
        answer_probabilities: Probability of each answer, whatever the action.
        seed: Seed of the policy.
    """
    random = np.random.default_rng(seed)
    num_answers = len(answer_probabilities)
    policy, answers = [], []
    num_states = 1
    for _ in range(num_turns):
        weight_SA = np.exp(0.5 * random.standard_normal((num_states, num_actions)))
        policy.append(weight_SA / weight_SA.sum(1, keepdims=True))
        answers.append(
            np.broadcast_to(answer_probabilities, (num_states, num_actions, num_answers))
        )
        num_states *= num_actions * num_answers
    histories: list[list[tuple[int, int]]] = [[]]
    for _ in range(num_turns):
        histories = [
            [*history, (action, answer)]
            for history in histories
            for action in range(num_actions)
            for answer in range(num_answers)
        ]
    return Game(name, policy, answers, np.array([reward(history) for history in histories]))


def all_games() -> list[Game]:
    """Return the games of the benchmark."""

    def share_right(history: list[tuple[int, int]]) -> float:
        return sum(action == 0 for action, _ in history) / len(history)

    return [
        # Every turn counts alike: the reward is probable in proportion to the right actions.
        make_game("sum", share_right),
        # Only the four right actions together win.
        make_game("needle", lambda history: float(share_right(history) == 1)),
        # The first action decides; the other turns change nothing.
        make_game("first_turn", lambda history: 0.9 if history[0][0] == 0 else 0.1),
        # The last action decides.
        make_game("last_turn", lambda history: 0.9 if history[-1][0] == 0 else 0.1),
        # One mistake can be repaired by the right action in the turn after it.
        make_game(
            "repair",
            lambda history: float(
                all(first[0] == 0 or second[0] == 0 for first, second in pairwise(history))
            ),
        ),
        # The tool's answer in the first turn is luck and decides half of the reward.
        make_game(
            "luck",
            lambda history: 0.5 * (history[0][1] == 0) + 0.5 * share_right(history),
            num_turns=3,
            answer_probabilities=(0.5, 0.5),
        ),
    ]
