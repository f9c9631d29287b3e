"""Passes of the policy: parts by hand, and a step measured on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.config.enums import Recompute
from mega_agentrl.estimate.duration.speeds import SPEEDS
from tests.estimate.configs import configured
from tests.estimate.duration.runs import H100, policy, workload
from tests.estimate.shapes import released


def test_a_tree_computes_its_prompt_once_for_each_part():
    one = policy(tokens=32_768).scoring_pass()
    two = policy(tokens=10_000).scoring_pass()
    # 16 answers of 1,000 tokens are one part beside the prompt, or two: 18,000 or 20,000 tokens.
    head = 2 * 5120 * 151_936 * 64 * 16_000 / (H100.peak_flops * H100.matmul)
    assert (two.matmul - head) / (one.matmul - head) == pytest.approx(20 / 18)


def test_matrix_products_are_divided_by_tensor_context_and_data_ranks():
    whole = policy().update().matmul
    for layout in ({"tensor": 2}, {"context": 2, "tokens": 4096}, {"data": 2}):
        assert policy(**layout).update().matmul == pytest.approx(whole / 2)


def test_the_ends_of_a_pipeline_wait_for_each_other():
    plain = policy(pipeline=4, tokens=16_384).update()
    halved = policy(pipeline=4, virtual_pipeline=2, tokens=16_384).update()
    # 64 trees of 20,000 tokens in micro-batches of 15,565 tokens at the most: 83.
    assert plain.bubble == pytest.approx(3 / 83 * (plain.total - plain.bubble - plain.optimizer))
    # The virtual stages round 83 up to a multiple of 4, and overlap what stages send each other.
    assert halved.bubble / plain.bubble == pytest.approx(0.5, rel=0.03)
    assert halved.collectives < plain.collectives


def test_recomputation_repeats_the_forward_pass_of_layers():
    parts = {}
    for recompute in Recompute:
        parts[recompute] = policy(recompute=recompute).update()
    none, some, full = parts.values()
    assert none.recompute == 0 < some.recompute < full.recompute
    assert full.matmul == none.matmul
    forward = policy().scoring_pass()
    head = 2 * 5120 * 151_936 * 64 * 16_000 / (H100.peak_flops * H100.matmul)
    assert full.recompute == pytest.approx(forward.total - head)


def test_experts_on_other_nodes_are_reached_over_the_network():
    layout = {"tensor": 4, "sequence_parallel": True, "data": 16, "tokens": 16_384}
    speeds = replace(H100, collective_s=0.0)
    near = policy("qwen3-235b-a22b", speeds=speeds, expert=8, **layout).update()
    far = policy("qwen3-235b-a22b", speeds=speeds, expert=64, **layout).update()
    # 7 of 8 copies over NVLink; then 7 of 64 over NVLink and 56 of 64 over links of an eighth.
    by_hand = (7 + 56 * 8) / 64 / (7 / 8)
    assert far.all_to_all / near.all_to_all == pytest.approx(by_hand)
    assert far.matmul == near.matmul


def test_short_micro_batches_wait_for_the_host():
    small = workload(num_prompts=1, group_size=1, prompt_tokens=16.0, response_tokens=16.0)
    short = policy("qwen3-30b-a3b", of=small).update()
    assert short.launches > short.matmul
    # The host needs 80 kernels forward and twice as many backward for each of the 48 layers.
    assert short.total - short.optimizer >= 48 * 3 * 80 * H100.launch_s
    assert policy("qwen3-30b-a3b").update().launches == 0


def test_a_step_measured_on_an_h200_is_predicted():
    """BENCHMARKS.md, "On one GPU": 16,384 tokens in rows of 4,096 through four layers: 0.326 s."""
    config = configured(tokens=17_300, prompt=32)
    config.batch.trees = False
    rows = workload(
        num_prompts=4, group_size=1, prompt_tokens=1.0, response_tokens=4095.0,
        max_response_tokens=4095.0, sampled_tokens=4095.0,
    )  # fmt: skip
    four_layers = replace(released("qwen2.5-7b"), num_layers=4)
    model = policy("qwen2.5-7b", config=config, of=rows, speeds=SPEEDS["H200"])
    model = replace(model, shape=four_layers)
    update = model.update()
    assert update.total == pytest.approx(0.326, rel=0.1)
    mfu = model.model_flops() / update.total / SPEEDS["H200"].peak_flops
    assert mfu == pytest.approx(0.469, rel=0.1)
