"""`train.controllers`: one value, the same after JSON; the KL weight moves as measured."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.ares import (
    AresHyperparams,
    AresState,
    AresStats,
    ReleasedKLController,
    update,
)
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import KlPlacement
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.train.controllers import (
    KL_HORIZON_SAMPLES,
    Controllers,
    adaptive_kl_weights,
    initial_controllers,
    update_kl,
)
from mega_agentrl.types.serialization import from_builtins, to_builtins
from tests.through_json import through_json
from tests.train.entropy_trees import path, steady, tree

numbers = st.floats(0, 1e3)
three = st.tuples(numbers, numbers, numbers)
maybe_three = st.tuples(*[st.none() | numbers] * 3)
controllers = st.builds(
    Controllers,
    ares=st.builds(
        AresState,
        difficulty_by_prompt=st.dictionaries(st.text(), st.integers(0, 2), max_size=3),
        targets=maybe_three,
        alphas=three,
        lambdas=three,
        betas=st.none() | three,
        threshold=st.none() | numbers,
        released_kl=st.builds(
            ReleasedKLController,
            betas=three,
            kl_means=maybe_three,
            errors=three,
            num_updates=st.integers(0, 10**6),
        ),
    ),
    mastery=st.dictionaries(st.text(), st.tuples(st.integers(0, 9), numbers), max_size=3).map(
        lambda seen: MasteryState(
            correct_streaks={name: streak for name, (streak, _) in seen.items()},
            last_entropies={name: entropy for name, (_, entropy) in seen.items()},
        )
    ),
    adaptive_kl=st.none()
    | st.builds(AdaptiveKL, coef=numbers, target=st.just(0.1), horizon=st.just(50)),
)


@settings(max_examples=60, deadline=None)
@given(controllers)
def test_json_and_back_is_the_same_value(value):
    assert through_json(value) == value


@pytest.mark.parametrize("name", ["targets", "released_kl"])
def test_a_field_that_an_older_state_lacks_has_its_default(name):
    plain = to_builtins(Controllers())
    del plain["ares"][name]
    assert from_builtins(Controllers, plain, "state") == Controllers()


def test_a_state_that_is_restored_after_each_step_goes_on_identically():
    stats = AresStats(
        prompt_ids=("a", "a", "b"),
        correct_B=torch.tensor([True, False, False]),
        hwe_B=torch.tensor([1, 3, 8]),
        p95_B=torch.tensor([1.0, 2.0, 3.0]),
        kl_B=torch.tensor([0.1, 0.2, 0.3]),
    )
    for name in ("paper", "released"):
        hyperparams = AresHyperparams(name=name, min_trajectories=1)
        straight = restored = AresState()
        for _ in range(5):
            straight = update(straight, stats, hyperparams)
            restored = through_json(update(restored, stats, hyperparams))
        assert straight == restored != AresState()


def test_the_kl_weight_follows_the_measured_kl():
    fixed = AlgoConfig(kl_coef=0.2)
    adaptive = AlgoConfig(kl_coef=0.2, kl_target=0.05)
    assert initial_controllers(fixed) == Controllers() == update_kl(Controllers(), 9.0, 4)
    assert Controllers().kl_coef(fixed) == 0.2
    above = update_kl(initial_controllers(adaptive), 0.5, 4)
    want = 0.2 * (1 + 0.2 * 4 / KL_HORIZON_SAMPLES)
    assert above.kl_coef(adaptive) == pytest.approx(want, rel=1e-9)
    for lost in (float("nan"), float("inf")):
        assert update_kl(above, lost, 1) == above


def test_an_adaptive_weight_is_handed_to_the_loss():
    batch = pack_trees([tree("p", path(1, steady(2)), path(0, steady(1)))])
    adaptive = AlgoConfig(kl_coef=0.2, kl_target=0.05)
    weight_BT = adaptive_kl_weights(initial_controllers(adaptive), adaptive, batch)
    assert torch.equal(weight_BT, torch.full((2, 6), 0.2))
    in_reward = AlgoConfig(kl_coef=0.2, kl_target=0.05, kl_placement=KlPlacement.reward)
    assert adaptive_kl_weights(initial_controllers(in_reward), in_reward, batch) is None
    assert adaptive_kl_weights(Controllers(), AlgoConfig(kl_coef=0.2), batch) is None
