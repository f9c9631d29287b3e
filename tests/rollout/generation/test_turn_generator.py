"""Engine requests within their budgets, their seeds, and the error of the top-k estimate."""

from __future__ import annotations

import math

import pytest

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.rollout.generation.turn_generator import (
    TopkEntropyError,
    TurnGenerator,
    continuation_seed,
    request_seed,
)
from mega_agentrl.types.records import ContextReset, FinishReason, Generation
from tests.fakes import FakeGenerator, make_context, make_prompt, turns


def _make_generator(write, *, max_model_len=100, context_resets=(), **options):
    generator, buffer = FakeGenerator(write), TokenBuffer()
    config = RolloutConfig(**options)
    context = make_context(config, generator=generator, max_model_len=max_model_len, step="s")
    made = TurnGenerator(context, make_prompt(), "p0", (2, 1), buffer, context_resets)
    return made, buffer, generator


async def test_parts_of_a_turn_have_names_and_seeds_of_their_own():
    turn_generator, buffer, generator = _make_generator(turns("x" * 50), max_response_tokens=30)
    assert turn_generator.trajectory_id == "p0/s/2.1" and turn_generator.num_tokens_left == 30
    assert await turn_generator.sample(4) is FinishReason.length
    await turn_generator.sample(5)
    buffer.close_turn("")
    await turn_generator.sample(6)
    names = [request.request_id for request in generator.requests]
    assert names == ["p0/s/2.1/0.0", "p0/s/2.1/0.1", "p0/s/2.1/1.0"]
    assert len({request.seed for request in generator.requests}) == 3
    assert [len(request.token_ids) for request in generator.requests] == [2, 6, 11]
    assert turn_generator.num_tokens_left == 30 - 15


async def test_a_context_reset_replaces_all_tokens_before():
    turn_generator, buffer, generator = _make_generator(turns("x" * 50), max_model_len=40)
    await turn_generator.sample(10)
    turn_generator.replace_context([ord(c) for c in "other?"])
    reset = ContextReset(start=10, token_ids=tuple(map(ord, "other?")))
    assert turn_generator.context_resets == (reset,)
    assert turn_generator.num_tokens_left == min(38 - 10, 40 - 6)
    await turn_generator.sample(3)
    await turn_generator.sample(2)
    assert bytes(generator.requests[-1].token_ids) == b"other?xxx"
    assert len(buffer) == 15
    turn_generator.replace_context([0] * 39)
    assert turn_generator.num_tokens_left == 1
    turn_generator.replace_context([0] * 45)
    assert turn_generator.num_tokens_left < 1


async def test_a_fork_continues_behind_its_parents_context_reset():
    reset = ContextReset(start=0, token_ids=(65, 63))
    turn_generator, _, generator = _make_generator(turns("x" * 5), context_resets=(reset,))
    await turn_generator.sample(1)
    assert generator.requests[0].token_ids == (65, 63)


def test_a_known_value_never_moves():
    # A change here changes what every run samples.
    assert request_seed(1, "train-3", "toolqa_7", (0, 1), 2, 0) == 8716954078516794663


def test_the_rest_of_a_request_has_a_seed_of_its_own():
    seeds = {continuation_seed(seed, num_tokens) for seed in (1, 2) for num_tokens in range(1, 9)}
    assert len(seeds | {1, 2}) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)


def generation(top_logps, entropies):
    num = len(entropies)
    return Generation(
        request_id="r",
        token_ids=(1,) * num,
        logps=(-1.0,) * num,
        entropies=tuple(entropies),
        argmax_ids=(1,) * num,
        finish_reason=FinishReason.length,
        stop_string=None,
        version=0,
        top_logps=tuple(map(tuple, top_logps)),
    )


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


def test_all_alternatives_listed_is_exact():
    exact = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
    gap = TopkEntropyError(3)
    gap.add(generation([logs(0.2, 0.5, 0.3)], [exact]))
    assert gap.mean == pytest.approx(0, abs=1e-12)


def test_the_rest_counts_as_one_outcome_and_the_sampled_token_beyond_k_not_at_all():
    # Exact: 0.5 and five times 0.1; the estimate from two: 0.5, 0.1 and 0.4 together.
    exact = -(0.5 * math.log(0.5) + 5 * 0.1 * math.log(0.1))
    estimate = -(0.5 * math.log(0.5) + 0.1 * math.log(0.1) + 0.4 * math.log(0.4))
    gap = TopkEntropyError(2)
    gap.add(generation([logs(0.1, 0.5, 0.1)], [exact]))
    assert gap.mean == pytest.approx(exact - estimate)
    gap.add(generation([logs(1.0)], [0.0]))
    assert gap.mean == pytest.approx((exact - estimate) / 2)


def test_without_top_k_or_top_logps_there_is_no_entropy_gap():
    gap = TopkEntropyError(0)
    gap.add(generation([logs(1.0)], [9.0]))
    assert gap.mean is None
    asked = TopkEntropyError(2)
    asked.add(generation([], [9.0]))
    assert asked.mean is None
