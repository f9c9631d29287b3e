"""`algo.gigpo` on numbers worked by hand."""

import pytest
import torch

from mega_agentrl.algo.advantage import grpo
from mega_agentrl.algo.gigpo import gigpo

REWARD, GROUP = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
# All start alike; the second turns of the first two follow the same answer.
TURNS = {
    "trajectory_S": torch.tensor([0, 0, 1, 1, 2]),
    "state_S": torch.tensor([0, 1, 0, 1, 0]),
    "num_later_S": torch.tensor([1, 0, 1, 0, 0]),
}


def test_turns_after_the_same_answer_are_compared():
    got = gigpo(REWARD, GROUP, **TURNS, gamma=0.5, weight=2.0, norm_by_std=False)
    # Returns of the first turns: 1/2, 0, 1, of mean 1/2; of the second turns 1 and 0.
    own = [1 / 3, 1 / 3, -2 / 3, -2 / 3, 1 / 3]
    turn = [0.0, 0.5, -0.5, -0.5, 0.5]
    assert got.tolist() == pytest.approx([a + 2 * b for a, b in zip(own, turn, strict=True)])


def test_a_turn_without_equal_turns_has_the_advantage_of_its_trajectory():
    alone = {**TURNS, "state_S": torch.arange(5)}
    got = gigpo(REWARD, GROUP, **alone)
    torch.testing.assert_close(got, grpo(REWARD, GROUP)[TURNS["trajectory_S"]])
