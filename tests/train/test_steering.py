"""A step's lesson and what it moves: ARES, adaptive KL, mastered prompts, over fakes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.algo.mastery import Mastery
from mega_agentrl.batch.pack import pack
from mega_agentrl.config.algo_schema import AlgoConfig, AresConfig
from mega_agentrl.config.choices import AresMode, KlPlace
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.train.controllers import KL_HORIZON, Controllers, start
from mega_agentrl.train.phases import collect_groups, open_groups
from mega_agentrl.train.session import Session
from mega_agentrl.train.steering import (
    first_controllers,
    leave_out_mastered,
    make_lesson,
    next_controllers,
    record_accuracies,
)
from mega_agentrl.types.batch import UpdateStats

REF_GAP = 0.5


def one_step(parts, config, controllers, num_skipped=0, ref_kl=0.1):
    with open_groups(parts, config) as groups:
        collected = collect_groups(parts, groups, 1)
    batch = parts.policy.add_logprobs(pack(collected.trees))
    batch = batch.with_fields(ref_logp_BT=batch.old_logp_BT - REF_GAP)
    lesson = make_lesson(parts, config, controllers, collected, batch)
    stats = UpdateStats(
        loss=0.0,
        grad_norm=1.0,
        learning_rate=0.1,
        num_tokens=1,
        num_skipped=num_skipped,
        metrics={"ref_kl": ref_kl},
    )
    after, shown = next_controllers(parts, config, controllers, lesson, collected, stats)
    return batch, lesson, after, shown


def test_without_ares_and_a_target_nothing_moves(parts, config):
    batch, lesson, after, shown = one_step(parts, config, start(config.algo))
    assert lesson.kl_weight_BT is None
    assert lesson.ares is None
    assert torch.equal(lesson.batch.reward_B, batch.reward_B)
    assert after == Controllers()
    assert shown == {}


def test_ares_weighs_kl_and_moves_its_controllers(parts, config):
    config.algo = AlgoConfig(kl_coef=0.5, ares=AresConfig(mode=AresMode.paper))
    batch, lesson, first, shown = one_step(parts, config, start(config.algo))
    assert lesson.ares is not None
    assert first.ares.threshold is not None
    assert set(first.ares.difficulty) == {"p0", "p1", "p2"}
    assert lesson.kl_weight_BT.shape == batch.mask_BT.shape
    # Windows of the fakes all have one entropy, which is then the threshold: all are high.
    weights = set(lesson.kl_weight_BT[batch.mask_BT].tolist())
    assert weights <= {0.25, 0.5}
    assert 0.25 in weights
    measured = [value for name, value in shown.items() if name.endswith("/kl")]
    assert measured
    assert all(value == pytest.approx(0.5 - 1 + 2.718281828**-0.5, abs=1e-5) for value in measured)
    _, _, second, _ = one_step(parts, config, first)
    # k3 of a gap of .5 nats is .1065, above every budget: the multipliers grow.
    grown = [lam for lam in second.ares.lambdas if lam > 0]
    assert grown
    assert max(second.ares.betas) == pytest.approx(0.5 + max(second.ares.lambdas))


def test_the_first_batch_shapes_nothing_and_later_ones_do(parts, config):
    config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper))
    batch, lesson, first, _ = one_step(parts, config, start(config.algo))
    assert torch.equal(lesson.batch.reward_B, batch.reward_B)
    # Had the right answers shown many more windows before, these hesitate too little or too much.
    state = replace(first.ares, targets=(0.0, 40.0, 40.0), alphas=(0.5, 0.5, 0.5))
    batch, lesson, _, _ = one_step(parts, config, replace(first, ares=state))
    assert not torch.equal(lesson.batch.reward_B, batch.reward_B)
    gap_B = lesson.batch.reward_B - batch.reward_B
    assert float(gap_B.abs().max()) <= 0.6


@pytest.mark.parametrize("place", KlPlace)
def test_the_coefficient_follows_the_measured_kl(parts, config, place):
    config.algo = AlgoConfig(kl_coef=0.1, kl_target=0.01, kl_place=place)
    controllers = start(config.algo)
    _, lesson, after, shown = one_step(parts, config, controllers)
    # Ten times the target: at most a fifth in the horizon.
    assert after.kl.coef == pytest.approx(0.1 * (1 + 0.2 / KL_HORIZON), rel=1e-9)
    assert shown["kl/coef"] == after.kl.coef
    assert (lesson.kl_weight_BT is None) is (place is KlPlace.reward)
    _, _, same, _ = one_step(parts, config, controllers, num_skipped=1)
    assert same == controllers


def test_a_kl_in_the_reward_moves_by_the_kl_of_the_batch(parts, config):
    config.algo = AlgoConfig(kl_coef=0.1, kl_target=0.1065, kl_place=KlPlace.reward)
    _, lesson, after, _ = one_step(parts, config, start(config.algo), ref_kl=0.0)
    assert lesson.metrics["advantage/kl"] == pytest.approx(0.106531, abs=1e-5)
    assert after.kl.coef == pytest.approx(0.1, abs=1e-8)


def test_mastered_prompts_are_left_out(parts, config):
    config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper, skip_mastered=True))
    sampler = PromptSampler(parts.prompts.prompts, seed=1)
    parts.prompts = sampler
    names = [prompt.prompt_id for prompt in sampler.prompts]
    calm = {name: 0.0 if name in names[:3] else 1.0 for name in names}
    mastery = Mastery(streaks=dict.fromkeys(names, 2), entropies=calm)
    leave_out_mastered(parts, config, Controllers(mastery=mastery))
    skipped = mastery.skipped(seed=config.seed, epoch=0)
    assert skipped
    taken = [prompt.prompt_id for prompt in sampler.next(len(names) - len(skipped))]
    assert sorted(taken) == sorted(set(names) - skipped)
    assert sampler.num_left_out <= len(skipped)


def test_the_bootstrap_comes_first_where_it_is_asked_for(parts, config):
    with Session(parts.run_dir, config) as session:
        assert first_controllers(parts, config, session) == Controllers()
        config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper, bootstrap=True))
        controllers = first_controllers(parts, config, session)
    assert set(controllers.ares.difficulty) == {
        prompt.prompt_id for prompt in parts.prompts.prompts
    }
    assert controllers.ares.threshold is not None


def test_the_sampler_learns_the_accuracy_of_what_finished(parts):
    def tree(name, *outcomes):
        made = SimpleNamespace(prompt=SimpleNamespace(prompt_id=name), trajectories=[])
        for correct in outcomes:
            score = None if correct is None else SimpleNamespace(correct=correct)
            made.trajectories.append(SimpleNamespace(failed=correct is None, score=score))
        return made

    seen = [tree("a", True, False, None), tree("b", None), tree("c", True), tree("a", True, True)]
    record_accuracies(parts, SimpleNamespace(seen=seen))
    assert parts.prompts.accuracies == {"a": 0.75, "c": 1.0}
