"""A step: what overlaps, who idles, what to change, and the steps that others have published."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import Recompute, RolloutCorrection, RouterReplay
from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.duration.step import predict_step
from mega_agentrl.estimate.preflight.balance import MAX_IDLE, suggest_balance
from mega_agentrl.estimate.preflight.suggestions import with_overrides
from mega_agentrl.estimate.weight_transfer import estimate_transfer
from tests.estimate.configs import check_of, configured
from tests.estimate.duration.runs import GOOD, H100, step_of, workload
from tests.estimate.shapes import released

LONG = workload(
    prompt_tokens=800.0, response_tokens=2500.0, max_response_tokens=6144.0, sampled_tokens=2000.0
)


def learning_s(step):
    return step.log_probs.total + step.update.total + step.driver_s + step.checkpoint_s


def run(**changes):
    config = configured(**(GOOD | changes))
    config.engine.enforce_eager = False
    return config


def test_policy_and_engines_wait_for_each_other_in_a_synchronous_run():
    step = step_of(run(), of=LONG, transfer_s=0.3)
    update_s = 0.3 + H100.update_overhead_s
    assert step.weight_update_s == update_s
    assert step.total_s == pytest.approx(step.rollout.total_s + learning_s(step) + update_s)
    engines_wait_s = learning_s(step) + step.rollout.wait_s
    assert step.engine_idle == pytest.approx(engines_wait_s / step.total_s)
    waiting_s = step.rollout.total_s + step.driver_s
    assert step.policy_idle == pytest.approx(waiting_s / step.total_s)


def test_one_step_off_a_step_takes_the_longer_of_both():
    config = run()
    config.rollout.max_staleness = 1
    step = step_of(config, of=LONG)
    longer_s = max(step.rollout.total_s, learning_s(step))
    assert step.total_s == pytest.approx(longer_s + step.weight_update_s)
    assert min(step.policy_idle, step.engine_idle) < 0.03


def test_two_steps_ahead_the_tail_overlaps_with_the_next_rollout():
    config = run(engines=4)
    config.rollout.max_staleness = 1
    one = step_of(config, of=LONG)
    config.rollout.max_staleness = 2
    two = step_of(config, of=LONG)
    assert two.total_s == pytest.approx(
        max(two.rollout.without_tail_s, learning_s(two)) + two.weight_update_s
    )
    assert two.total_s < one.total_s


def test_partial_rollouts_have_no_tail_if_more_prompts_are_started():
    config = run()
    config.rollout.partial_rollout = True
    whole = step_of(config, of=LONG)
    config.rollout.num_oversampled_prompts = 16
    partial = step_of(config, of=LONG)
    saved_s = whole.rollout.total_s - whole.rollout.without_tail_s
    assert whole.total_s - partial.total_s == pytest.approx(saved_s)


def test_shared_gpus_are_never_idle_but_move_the_policys_state():
    config = run(engines=8)
    config.cluster.colocated = True
    step = step_of(config, of=LONG)
    # 32 ranks: 32.8e9 parameters over 4 tensor ranks, 2 bytes and 12 / 8 of the optimizer.
    by_hand = 2 * 32.76e9 / 4 * (2 + 12 / 8) / H100.host_link
    assert step.offload_s == pytest.approx(by_hand, rel=0.01)
    expected_s = step.rollout.total_s + learning_s(step) + step.weight_update_s + by_hand
    assert step.total_s == pytest.approx(expected_s, rel=0.01)
    assert step.policy_idle == step.engine_idle < 0.05
    assert step.num_gpus == 32
    assert step.gpu_hours_per_100_steps == pytest.approx(step.total_s * 32 / 36)


def test_a_reference_takes_a_pass_and_a_critic_makes_the_policy_wait():
    config = run()
    without_pass = step_of(config, of=LONG)
    config.model.router_replay = RouterReplay.old  # records the routes in a pass
    plain = step_of(config, of=LONG)
    assert without_pass.log_probs.total == 0 < plain.log_probs.total
    assert plain.total_s == pytest.approx(without_pass.total_s + plain.log_probs.total)
    config.algo.kl_coef = 0.1
    with_reference = step_of(config, of=LONG)
    assert with_reference.total_s == pytest.approx(plain.total_s + plain.log_probs.total)
    config.algo.advantage = "gae"
    with_critic = step_of(config, of=LONG)
    critic_s = plain.log_probs.total + plain.update.total
    assert with_critic.total_s == pytest.approx(with_reference.total_s + critic_s)
    assert with_critic.policy_idle > with_reference.policy_idle


def test_a_critic_on_the_policys_gpus_saves_its_own_and_moves_both_states():
    config = run()
    config.algo.advantage = "gae"
    apart = step_of(config, of=LONG)
    config.cluster.colocated_models = True
    shared = step_of(config, of=LONG)
    by_hand = 2 * 2 * 32.76e9 / 4 * (2 + 12 / 8) / H100.host_link
    assert shared.offload_s == pytest.approx(by_hand, rel=0.01)
    assert shared.total_s == pytest.approx(apart.total_s + by_hand, rel=0.01)
    assert shared.num_gpus == apart.num_gpus - config.parallel.world_size
    assert shared.policy_idle < apart.policy_idle


def suggestions(config, of=LONG):
    shape = released("qwen3-32b")
    return suggest_balance(config, shape, DeviceSpec(), H100, of, check_of(shape), imbalance=1.0)


def test_changes_are_suggested_that_make_a_side_idle_less():
    config = run(tensor=8, data=4)
    now = step_of(config, of=LONG)
    assert min(now.policy_idle, now.engine_idle) > 0.3
    found = suggestions(config)
    assert found
    hours = [one.step.gpu_hours_per_100_steps for one in found]
    assert hours == sorted(hours) and hours[-1] < now.gpu_hours_per_100_steps
    settings = found[0].change.new_values
    changed = with_overrides(config, settings)
    assert step_of(changed, of=LONG) == found[0].step
    assert found[0].step.idle <= MAX_IDLE
    if "rollout.max_staleness" in settings:
        assert settings["algo.rollout_correction"] is RolloutCorrection.token_truncate
    assert suggestions(changed) == []
    assert "policy idle" in str(found[0])


def test_the_former_recipe_of_235b_idled_and_reached_a_tenth_of_the_peak():
    """TP 4, CP 4, DP 8, PP 2, EP 64 with 4,096 tokens on 4 ranks, synchronous."""
    config = configured(
        prompt=4096, response=12_288, tokens=4096, engine=8, engines=32, tensor=4, context=4,
        data=8, pipeline=2, expert=64, sequence_parallel=True,
    )  # fmt: skip
    config.engine.gpu_memory_utilization, config.engine.max_num_seqs = 0.9, 128
    config.data.prompts_per_step, config.optim.num_minibatches = 256, 4
    long = workload(
        num_prompts=256, prompt_tokens=1638.0, response_tokens=4915.0, max_response_tokens=12_288.0,
        sampled_tokens=3686.0, shared_tokens=614.0, num_calls=4.8, call_s=0.5,
    )  # fmt: skip
    step = step_of(config, "qwen3-235b-a22b", of=long)
    assert 0.08 < step.mfu < 0.14
    assert step.update.all_to_all > step.update.matmul
    assert step.policy_idle > 0.5 and step.engine_idle > 0.25


# ---- what others have measured -------------------------------------------------------------------

NEMO_RL = {
    # model, tokens of a trajectory, GPUs, off-policy, engine TP, training TP and PP, seconds
    "8B on policy": ("qwen3-8b", 1060, 16, False, 1, 1, 2, 97.7),
    "8B one step off": ("qwen3-8b", 1129, 16, True, 1, 1, 2, 74.6),
    "32B on policy": ("qwen3-32b", 3206, 32, False, 4, 4, 4, 393.0),
    "32B one step off": ("qwen3-32b", 3207, 64, True, 4, 4, 4, 215.0),
}
"""Published GRPO steps of NeMo RL v0.4 on H100s in bfloat16, Megatron-core and vLLM
(docs/about/performance-summary.md of NVIDIA-NeMo/RL): 2,048 trajectories of at most 4,096 tokens a
step in 4 optimizer steps. Half of the GPUs sample in the runs one step off; all do both on policy.
Qwen3-8B stands for Llama-3.1-8B. Prompts (100 tokens, groups of 32, a reference, recomputation of
the 32B model) are not on the page but in its recipes or assumed."""


def published_run(tokens, gpus, off_policy, engine_tensor, tensor, pipeline):
    policy_gpus = gpus // 2 if off_policy else gpus
    engine_gpus = policy_gpus if off_policy else gpus
    config = configured(
        prompt=100, response=3996, tokens=4096, engine=engine_tensor,
        engines=engine_gpus // engine_tensor, tensor=tensor, pipeline=pipeline,
        data=policy_gpus // (tensor * pipeline), sequence_parallel=tensor > 1,
    )  # fmt: skip
    config.engine.gpu_memory_utilization = 0.85 if off_policy else 0.6
    config.engine.max_num_seqs, config.engine.enforce_eager = 1024, False
    config.cluster.colocated = not off_policy
    config.rollout.max_staleness, config.weight_sync.in_flight = int(off_policy), off_policy
    config.rollout.group_size, config.optim.num_minibatches = 32, 4
    config.batch.trees, config.save_every_steps, config.algo.kl_coef = False, 0, 0.01
    response = tokens - 100.0
    return config, workload(
        group_size=32, prompt_tokens=100.0, response_tokens=response, max_response_tokens=3996.0,
        sampled_tokens=response,
    )  # fmt: skip


@pytest.mark.parametrize("row", NEMO_RL.values(), ids=NEMO_RL)
def test_published_steps_of_dense_models_are_predicted_within_a_quarter(row):
    name, *sizes, seconds = row
    config, trajectories = published_run(*sizes)
    if name == "qwen3-32b":
        config.parallel.recompute = Recompute.full
    step = predict_step(config, released(name), DeviceSpec(), H100, trajectories, transfer_s=0.5)
    assert step.total_s == pytest.approx(seconds, rel=0.25)


def test_a_weight_update_takes_as_long_as_published():
    """NeMo-RL: 0.21 to 0.34 s for Qwen3-4B from 8 H100s to 8 others."""
    config = configured(tensor=2, data=4, engine=1, engines=8)
    transfer = estimate_transfer(config, released("qwen3-4b"), DeviceSpec())
    step = step_of(config, "qwen3-4b", transfer_s=transfer.predicted_s)
    assert 0.21 <= step.weight_update_s <= 0.34
