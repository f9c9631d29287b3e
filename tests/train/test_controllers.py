"""`train.controllers`: one value, the same after JSON; the KL weight moves as measured."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.ares import AresState
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.algo.mastery import Mastery
from mega_agentrl.batch.pack import pack
from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.choices import KlPlace
from mega_agentrl.train.controllers import Controllers, kl_after, loss_kl_weights, start
from tests.train.hesitant_trees import path, steady, tree

numbers = st.floats(0, 1e3)
three = st.tuples(numbers, numbers, numbers)
controllers = st.builds(
    Controllers,
    ares=st.builds(
        AresState,
        difficulty=st.dictionaries(st.text(), st.integers(0, 2), max_size=3),
        targets=st.tuples(*[st.none() | numbers] * 3),
        alphas=three,
        lambdas=three,
        betas=st.none() | three,
        threshold=st.none() | numbers,
    ),
    mastery=st.dictionaries(st.text(), st.tuples(st.integers(0, 9), numbers), max_size=3).map(
        lambda seen: Mastery(
            streaks={name: streak for name, (streak, _) in seen.items()},
            entropies={name: entropy for name, (_, entropy) in seen.items()},
        )
    ),
    kl=st.none() | st.builds(AdaptiveKL, coef=numbers, target=st.just(0.1), horizon=st.just(50)),
)


@settings(max_examples=60, deadline=None)
@given(controllers)
def test_json_and_back_is_the_same_value(value):
    assert Controllers.from_plain(json.loads(json.dumps(value.to_plain()))) == value


def test_other_fields_are_refused():
    with pytest.raises(ValueError, match="another version"):
        Controllers.from_plain({"ares": {}, "mastery": {}})


def test_the_kl_weight_follows_the_measured_kl():
    fixed = AlgoConfig(kl_coef=0.2)
    adaptive = AlgoConfig(kl_coef=0.2, kl_target=0.05, kl_horizon=10)
    assert start(fixed) == Controllers() and start(fixed).kl_coef(fixed) == 0.2
    assert kl_after(start(fixed), 9.0, 4) == start(fixed)
    above = kl_after(start(adaptive), 0.5, 4)
    assert above.kl_coef(adaptive) == pytest.approx(0.2 * (1 + 0.2 * 4 / 10))
    below = kl_after(start(adaptive), 0.045, 4)
    assert below.kl_coef(adaptive) == pytest.approx(0.2 * (1 - 0.1 * 4 / 10))
    for lost in (float("nan"), float("inf")):
        assert kl_after(above, lost, 1) == above


def test_an_adaptive_weight_is_handed_to_the_loss():
    batch = pack([tree("p", path(1, steady(2)), path(0, steady(1)))])
    adaptive = AlgoConfig(kl_coef=0.2, kl_target=0.05)
    weight_BT = loss_kl_weights(start(adaptive), adaptive, batch)
    assert torch.equal(weight_BT, torch.full((2, 6), 0.2))
    in_reward = AlgoConfig(kl_coef=0.2, kl_target=0.05, kl_place=KlPlace.reward)
    assert loss_kl_weights(start(in_reward), in_reward, batch) is None
    assert loss_kl_weights(Controllers(), AlgoConfig(kl_coef=0.2), batch) is None
