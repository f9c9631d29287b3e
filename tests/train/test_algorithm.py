"""Inputs of a step and the controllers after it: ARES, adaptive KL, mastered prompts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import AresMode, KlPlacement
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.train.algorithm import Algorithm, bootstrap_controllers, prompt_accuracies
from mega_agentrl.train.controllers import KL_HORIZON_SAMPLES, Controllers, initial_controllers
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.scheduler import open_rollout_scheduler
from mega_agentrl.train.signals import SignalHandler
from mega_agentrl.types.batch import UpdateStats

REF_GAP = 0.5


def one_step(components, config, controllers, num_skipped=0, ref_kl=0.1):
    with open_rollout_scheduler(components, config, SignalHandler()) as scheduler:
        rollout_batch = scheduler.collect(1)
    batch = components.policy.compute_log_probs(pack_trees(rollout_batch.trees))
    batch = batch.with_fields(ref_logp_BT=batch.old_logp_BT - REF_GAP)
    algorithm = Algorithm(components, config, controllers)
    train_inputs = algorithm.compute_advantages(rollout_batch, batch)
    stats = UpdateStats(
        loss=0.0,
        grad_norm=1.0,
        learning_rate=0.1,
        num_tokens=1,
        num_skipped_steps=num_skipped,
        metrics={"ref_kl": ref_kl},
    )
    shown = algorithm.observe(rollout_batch, train_inputs, stats)
    return batch, train_inputs, algorithm.controllers, shown


def test_without_ares_and_a_kl_target_controllers_do_not_change(components, config):
    batch, train_inputs, after, shown = one_step(components, config, Controllers())
    assert train_inputs.kl_weight_BT is None and train_inputs.ares_step is None
    assert torch.equal(train_inputs.batch.reward_B, batch.reward_B)
    assert after == Controllers() and shown == {"data/epoch": 0.5}
    assert set(components.prompt_source.accuracies) == {"p0", "p1", "p2"}


def test_ares_weighs_kl_and_moves_its_controllers(components, config):
    config.algo = AlgoConfig(kl_coef=0.5, ares=AresConfig(mode=AresMode.paper))
    batch, train_inputs, first, shown = one_step(components, config, Controllers())
    assert train_inputs.ares_step is not None
    assert first.ares.threshold is not None
    assert set(first.ares.difficulty_by_prompt) == {"p0", "p1", "p2"}
    assert train_inputs.kl_weight_BT.shape == batch.mask_BT.shape
    # Windows of the fakes all have one entropy, which is then the threshold: all are high.
    weights = set(train_inputs.kl_weight_BT[batch.mask_BT].tolist())
    assert weights <= {0.25, 0.5} and 0.25 in weights
    measured = [value for name, value in shown.items() if name.endswith("/kl")]
    k3 = 0.5 - 1 + 2.718281828**-0.5
    assert measured and measured == pytest.approx([k3] * len(measured), abs=1e-5)
    _, _, second, _ = one_step(components, config, first)
    # k3 of a gap of .5 nats is .1065, above every budget: the multipliers grow.
    assert max(second.ares.lambdas) > 0
    assert max(second.ares.betas) == pytest.approx(0.5 + max(second.ares.lambdas))


def test_ares_without_shaping_weighs_kl_in_the_reward(components, config):
    settings = AresConfig(mode=AresMode.paper, shape_rewards=False)
    config.algo = AlgoConfig(kl_coef=0.5, ares=settings)
    first = one_step(components, config, Controllers())[2]
    state = replace(first.ares, targets=(0.0, 40.0, 40.0), alphas=(0.5, 0.5, 0.5))
    advantages = []
    for place in KlPlacement:
        config.algo = AlgoConfig(kl_coef=0.5, ares=settings, kl_placement=place)
        batch, train_inputs, _, _ = one_step(components, config, replace(first, ares=state))
        assert torch.equal(train_inputs.batch.reward_B, batch.reward_B)
        assert (train_inputs.kl_weight_BT is None) is (place is KlPlacement.reward)
        advantages.append(train_inputs.batch.advantage_BT)
    assert not torch.equal(*advantages)


def test_the_first_batch_shapes_nothing_and_later_ones_do(components, config):
    config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper))
    batch, train_inputs, first, _ = one_step(components, config, Controllers())
    assert torch.equal(train_inputs.batch.reward_B, batch.reward_B)
    # Had the right answers shown many more windows before, these hesitate too little or too much.
    state = replace(first.ares, targets=(0.0, 40.0, 40.0), alphas=(0.5, 0.5, 0.5))
    batch, train_inputs, _, _ = one_step(components, config, replace(first, ares=state))
    assert not torch.equal(train_inputs.batch.reward_B, batch.reward_B)
    gap_B = train_inputs.batch.reward_B - batch.reward_B
    assert float(gap_B.abs().max()) <= 0.6


@pytest.mark.parametrize("place", KlPlacement)
def test_the_coefficient_follows_the_measured_kl(components, config, place):
    config.algo = AlgoConfig(kl_coef=0.1, kl_target=0.01, kl_placement=place)
    controllers = initial_controllers(config.algo)
    _, train_inputs, after, shown = one_step(components, config, controllers)
    # Ten times the target: at most a fifth in the horizon, which counts trajectories.
    num_samples = int(train_inputs.batch.mask_BT.any(1).sum())
    assert num_samples == config.data.prompts_per_step * config.rollout.group_size
    want = 0.1 * (1 + 0.2 * num_samples / KL_HORIZON_SAMPLES)
    assert after.adaptive_kl.coef == pytest.approx(want, rel=1e-9)
    assert shown["kl/coef"] == after.adaptive_kl.coef
    assert (train_inputs.kl_weight_BT is None) is (place is KlPlacement.reward)
    _, _, same, _ = one_step(components, config, controllers, num_skipped=2)
    assert same == controllers


def test_a_kl_in_the_reward_moves_by_the_kl_of_the_batch(components, config):
    config.algo = AlgoConfig(kl_coef=0.1, kl_target=0.10653066, kl_placement=KlPlacement.reward)
    _, train_inputs, after, _ = one_step(
        components, config, initial_controllers(config.algo), ref_kl=0.0
    )
    assert train_inputs.metrics["advantage/ref_kl"] == pytest.approx(0.106531, abs=1e-5)
    assert after.adaptive_kl.coef == pytest.approx(0.1, abs=1e-8)


def test_mastered_prompts_are_left_out(components, config):
    config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper, skip_mastered=True))
    sampler = PromptSampler(components.prompt_source.prompts, seed=1)
    components.prompt_source = sampler
    names = [prompt.prompt_id for prompt in sampler.prompts]
    calm = {name: 0.0 if name in names[:3] else 1.0 for name in names}
    mastery = MasteryState(correct_streaks=dict.fromkeys(names, 2), last_entropies=calm)
    Algorithm(components, config, Controllers(mastery=mastery))
    skipped = mastery.skipped_prompts(seed=config.seed, epoch=0)
    assert skipped
    taken = [prompt.prompt_id for prompt in sampler.next_prompts(len(names) - len(skipped))]
    assert sorted(taken) == sorted(set(names) - skipped)
    assert sampler.num_excluded <= len(skipped)


def test_the_bootstrap_comes_first_where_it_is_asked_for(components, config):
    with RunLogger(components.run_dir, config) as session:
        assert bootstrap_controllers(components, config, session) == Controllers()
        config.algo = AlgoConfig(ares=AresConfig(mode=AresMode.paper, bootstrap=True))
        controllers = bootstrap_controllers(components, config, session)
    assert set(controllers.ares.difficulty_by_prompt) == {
        prompt.prompt_id for prompt in components.prompt_source.prompts
    }
    assert controllers.ares.threshold is not None


def test_the_accuracy_of_a_prompt_counts_finished_trajectories():
    def tree(name, *outcomes):
        made = SimpleNamespace(prompt=SimpleNamespace(prompt_id=name), trajectories=[])
        for correct in outcomes:
            score = None if correct is None else SimpleNamespace(correct=correct)
            made.trajectories.append(SimpleNamespace(failed=correct is None, score=score))
        return made

    trees = [tree("a", True, False, None), tree("b", None), tree("c", True), tree("a", True, True)]
    assert prompt_accuracies(SimpleNamespace(finished_trees=trees)) == {"a": 0.75, "c": 1.0}
