"""The games of `tools/bench_credit.py`: their true values, and that its samples agree with them."""

from argparse import Namespace
from itertools import product

import numpy as np
import pytest

from tools.bench_credit import Sampler, algorithms, measure
from tools.credit.games import Game, all_games, make_game

pytestmark = pytest.mark.extended

ARGUMENTS = Namespace(batches=12, turns=32, seed=0)


@pytest.fixture
def game():
    return make_game(
        "luck",
        lambda history: 0.5 * (history[0][1] == 0) + 0.5 * (history[1][0] == 1),
        num_turns=2,
        num_actions=2,
        answer_probabilities=(0.25, 0.75),
    )


def test_values_and_probabilities_of_a_game_are_those_worked_out_by_hand():
    even = np.full((1, 2), 0.5)
    game = Game(
        "two turns",
        [even, np.array([[0.5, 0.5], [0.25, 0.75]])],
        [np.ones((1, 2, 1)), np.ones((2, 2, 1))],
        np.array([1.0, 0.0, 1.0, 0.0]),
    )
    assert [value.tolist() for value in game.value_DS] == [[0.375], [0.5, 0.25], [1, 0, 1, 0]]
    assert game.advantage_DSA[0].tolist() == [[0.125, -0.125]]
    assert game.advantage_DSA[1].tolist() == [[0.5, -0.5], [0.75, -0.25]]
    assert game.gradient.tolist() == [0.0625, -0.0625, 0.125, -0.125, 0.09375, -0.09375]
    assert game.greedy_value() == 1.0


def test_the_gradient_is_that_of_the_expected_reward(game):
    logits = [np.log(policy) for policy in game.policy_DSA]
    sizes = np.cumsum([0] + [one.size for one in logits])
    for turn, logit in enumerate(logits):
        for state, action in product(range(len(logit)), range(2)):
            shifted = [one.copy() for one in logits]
            shifted[turn][state, action] += 1e-6
            policy = [np.exp(one) / np.exp(one).sum(1, keepdims=True) for one in shifted]
            other = Game(game.name, policy, game.answer_DSAO, game.reward_S)
            slope = (other.value_DS[0][0] - game.value_DS[0][0]) / 1e-6
            place = sizes[turn] + state * 2 + action
            assert slope == pytest.approx(game.gradient[place], abs=1e-5)


@pytest.mark.parametrize("way", ["flat", "forked"])
def test_trajectories_have_the_policy_s_probabilities(game, way):
    sampler = Sampler(game, 8, seed=3)
    groups = [group for _ in range(60) for group in sampler.sample(way)]
    seen = np.bincount(
        [one.states[-1] for group in groups for one in group.trajectories],
        minlength=len(game.reward_S),
    )
    np.testing.assert_allclose(seen / seen.sum(), game.visits_DS[-1], atol=0.025)


def test_forked_groups_sample_as_many_turns_as_flat_ones():
    for game in all_games():
        for way in ("flat", "forked"):
            for group in Sampler(game, 24, seed=1).sample(way):
                tokens = {token for one in group.trajectories for token in one.tokens}
                assert len(tokens) == 24


@pytest.mark.parametrize("estimator", algorithms())
def test_estimators_point_along_the_true_gradient(estimator):
    game = next(game for game in all_games() if game.name == "first_turn")
    found = measure(game, algorithms()[estimator], "forked", ARGUMENTS)
    assert found["bias"] < 0.1
    assert found["bias"] < found["error"] < 0.5
