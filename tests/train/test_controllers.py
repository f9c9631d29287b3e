"""`train.controllers`: one value, the same after JSON; the KL weight moves as measured."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.ares import PAPER_HYPERPARAMS, AresState
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import KlPlacement
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.shaping import start_ares_step, update_controllers
from mega_agentrl.train.controllers import (
    KL_HORIZON_STEPS,
    Controllers,
    adaptive_kl_weights,
    initial_controllers,
    update_kl,
)
from tests.fakes import make_prompt
from tests.train.entropy_trees import path, steady, tree

numbers = st.floats(0, 1e3)
three = st.tuples(numbers, numbers, numbers)
controllers = st.builds(
    Controllers,
    ares=st.builds(
        AresState,
        difficulty_by_prompt=st.dictionaries(st.text(), st.integers(0, 2), max_size=3),
        targets=st.tuples(*[st.none() | numbers] * 3),
        alphas=three,
        lambdas=three,
        betas=st.none() | three,
        threshold=st.none() | numbers,
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
    assert Controllers.from_dict(json.loads(json.dumps(value.to_dict()))) == value


def test_other_fields_are_refused():
    with pytest.raises(ValueError, match="another version"):
        Controllers.from_dict({"ares": {}, "mastery": {}})


def test_the_kl_weight_follows_the_measured_kl():
    fixed = AlgoConfig(kl_coef=0.2)
    adaptive = AlgoConfig(kl_coef=0.2, kl_target=0.05)
    assert (
        initial_controllers(fixed) == Controllers()
        and initial_controllers(fixed).kl_coef(fixed) == 0.2
    )
    assert update_kl(initial_controllers(fixed), 9.0, 4) == initial_controllers(fixed)
    above = update_kl(initial_controllers(adaptive), 0.5, 4)
    assert above.kl_coef(adaptive) == pytest.approx(
        0.2 * (1 + 0.2 * 4 / KL_HORIZON_STEPS), rel=1e-9
    )
    below = update_kl(initial_controllers(adaptive), 0.045, 4)
    assert below.kl_coef(adaptive) == pytest.approx(
        0.2 * (1 - 0.1 * 4 / KL_HORIZON_STEPS), rel=1e-9
    )
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


def test_mastered_prompts_are_skipped_until_a_coin_brings_them_back_and_they_fail():
    """Of ten prompts all are solved, one of them without hesitation, and wrongly from its fifth
    visit on."""
    sampler = PromptSampler([make_prompt(f"q{number}") for number in range(10)], seed=3)
    controllers, epochs, taken = Controllers(), [], []
    while sampler.epoch < 80:
        mastery = controllers.mastery
        sampler.exclude(lambda epoch, now=mastery: now.skipped_prompts(seed=5, epoch=epoch))
        (prompt,) = sampler.next_prompts(1)
        sampler.ack([prompt])
        taken.append(prompt.prompt_id)
        number = int(prompt.prompt_id[1:])
        if number == 4:
            epochs.append(sampler.epoch)
        is_correct = number != 4 or len(epochs) < 5
        turn = [0.1 if number == 4 else 2.0 + number] * 6
        seen = collect_entropy_stats([tree(prompt.prompt_id, path(int(is_correct), turn))], None)
        step = start_ares_step(seen, controllers.ares, PAPER_HYPERPARAMS, filtered=False)
        controllers = update_controllers(controllers, step, None)
        controllers = Controllers.from_dict(json.loads(json.dumps(controllers.to_dict())))
    assert epochs[:2] == [0, 1], "two visits make it mastered"
    assert epochs[4] > 15, "then it comes once in ten epochs"
    assert epochs[4:] == list(range(epochs[4], epochs[4] + len(epochs) - 4)), "it failed"
    assert len(epochs) > 10
    # q0 is in the lowest fifth as well, the others never are.
    assert {taken.count(f"q{number}") for number in (1, 2, 3, 5, 6, 7, 8, 9)} <= {80, 81}
    assert sampler.num_excluded > 80
