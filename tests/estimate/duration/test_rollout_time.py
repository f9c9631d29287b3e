"""Continuous batching: what bounds a step of an engine, the tail, and waits for tools."""

from __future__ import annotations

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.estimate.duration.rollout import predict_rollout
from mega_agentrl.estimate.duration.speeds import device_speeds
from mega_agentrl.estimate.duration.workload import expected_workload, measured_workload
from tests.estimate.configs import configured
from tests.estimate.duration.runs import H100, engine, workload


def test_a_small_batch_reads_the_weights_and_a_large_one_computes():
    model = engine()
    host_s = H100.engine_step_s + H100.engine_request_s
    # 7.07 billion parameters without the embedding, in bfloat16.
    read_s = 2 * (7.615e9 - 0.545e9) / (H100.memory * H100.decode)
    assert model.step_s(1, 0) == pytest.approx(read_s + host_s, rel=0.01)
    assert model.step_s(8, 0) < 1.1 * model.step_s(1, 0)
    compute_s = 2 * 7.07e9 / (H100.peak_flops * H100.matmul)
    growth_s = model.step_s(4096, 0) - model.step_s(2048, 0)
    assert growth_s == pytest.approx(2048 * (compute_s + H100.engine_request_s), rel=0.01)
    # 28 layers, 4 key heads of 128: 57,344 bytes a token.
    kv_s = model.step_s(64, 10_000) - model.step_s(64, 0)
    assert kv_s == pytest.approx(64 * 10_000 * 57_344 / (H100.memory * H100.decode))


def test_a_batch_reads_the_experts_that_its_tokens_go_to():
    model = engine("qwen3-30b-a3b")

    def parameters(requests):
        host_s = H100.engine_step_s + requests * H100.engine_request_s
        return (model.step_s(requests, 0) - host_s) * H100.memory * H100.decode / 2

    # 3.34 billion active parameters without an embedding of 0.31; 30.5 in all.
    assert parameters(1) == pytest.approx(3.03e9, rel=0.02)
    assert parameters(128) == pytest.approx(30.2e9, rel=0.02)


def test_equal_trajectories_decode_in_lock_step_without_a_tail():
    config = configured(engines=16)
    model = engine(config=config)
    equal = workload(prompt_tokens=1.0, num_calls=0.0)
    time = predict_rollout(model, equal)
    context = 1 + 500
    # 64 trajectories in an engine, 1,000 steps; a request waits 0.02 s for its first one.
    expected_s = 1000 * model.step_s(64, context) + H100.request_s
    assert time.total_s - time.prefill_s == pytest.approx(expected_s, rel=0.01)
    assert (time.tail_s, time.batch) == (0, pytest.approx(64, rel=0.01))
    assert time.tokens_per_s == pytest.approx(1_024_000 / time.total_s)


def test_a_few_long_trajectories_make_a_tail():
    model = engine(engines=8)
    equal = predict_rollout(model, workload())
    uneven = predict_rollout(model, workload(max_response_tokens=6000.0))
    assert uneven.total_s > 2 * equal.total_s
    assert uneven.tail_s > 0.5 * uneven.total_s
    assert uneven.without_tail_s < uneven.total_s - 0.5 * uneven.tail_s


def test_an_engine_has_nothing_to_do_while_all_wait_for_tools():
    model = engine(engines=64)
    fast = predict_rollout(model, workload(num_prompts=8, group_size=8, num_calls=5.0))
    slow = predict_rollout(model, workload(num_prompts=8, group_size=8, num_calls=5.0, call_s=10.0))
    assert slow.total_s == pytest.approx(fast.total_s + 50, rel=0.05)
    assert slow.wait_s == pytest.approx(50, rel=0.05)
    # With more trajectories some decode while others wait.
    many = predict_rollout(engine(engines=1), workload(num_calls=5.0, call_s=10.0))
    assert many.wait_s == 0


def test_an_engine_decodes_what_fits_its_cache():
    model = engine(engines=1)
    wide = workload(prompt_tokens=1.0)
    assert predict_rollout(model, wide).batch == pytest.approx(256, rel=0.01)  # max_num_seqs
    long = workload(response_tokens=6000.0, max_response_tokens=6000.0, sampled_tokens=6000.0)
    small = engine("qwen2.5-72b", engine=4, engines=1)
    assert predict_rollout(small, long).batch < 256


def test_the_lengths_have_their_mean_and_their_longest():
    lengths = workload(max_response_tokens=4000.0).relative_lengths(1000)
    assert sum(lengths) / 1000 == pytest.approx(1, rel=0.01)
    assert max(lengths) == pytest.approx(4, rel=0.01)
    # In the order in which they start there is no trend.
    assert sum(lengths[:500]) == pytest.approx(sum(lengths[500:]), rel=0.05)


def test_the_expected_workload_follows_from_the_settings():
    config = configured(prompt=1000, response=5000)
    config.rollout.max_tool_calls, config.rollout.max_turns = 10, 6
    expected = expected_workload(config)
    assert (expected.num_prompts, expected.group_size) == (64, 16)
    assert (expected.prompt_tokens, expected.response_tokens) == (400, 2000)
    assert expected.num_calls == 2  # of 5 at the most
    # Half of the trajectories are forks, which share a quarter of their response.
    assert expected.shared_tokens == 2000 / 8
    config.rollout.max_tool_calls = 0
    assert expected_workload(config, response_tokens=9000.0).sampled_tokens == 5000
    config.rollout.max_tool_calls, config.rollout.branching = 10, "none"
    assert expected_workload(config).shared_tokens == 0


def test_the_workload_of_a_run_is_that_of_its_metrics():
    metrics = {
        "rollout/num_trajectories": 32.0, "rollout/prompt_tokens_mean": 20.0,
        "rollout/response_tokens_mean": 60.0, "rollout/response_tokens_max": 96.0,
        "rollout/sampled_tokens_mean": 50.0, "rollout/tool_calls_mean": 1.5,
        "rollout/tool_latency_mean_s": 0.2, "tree/token_ratio": 1.6,
    }  # fmt: skip
    config = configured()
    measured = measured_workload(config, metrics)
    assert measured.num_prompts == 2
    # 16 x 80 tokens over 1.6 are 800: the prompt's 20, and 780 of the 960 of responses.
    assert measured.shared_tokens == pytest.approx((960 - 780) / 16)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(InputError) as caught:
        device_speeds("H800")
    assert (caught.value.name, caught.value.got) == ("device", "H800")
