"""The batch of a step, and what happens to every prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching, FilterMetric
from mega_agentrl.rollout.groups import batch_collector as module
from tests.fakes import FakeGenerator, FakeTools
from tests.rollout.graded_prompts import (
    RecordingPromptSource,
    SlowTools,
    collect_steps,
    make_collector,
    make_config,
    make_prompts,
    names,
    run,
    write,
)
from tests.rollout.stepped_engine import SteppedGenerator


def test_filtered_groups_are_replaced_and_counted():
    kinds = ["M", "E", "H", "M", "H", "M", "M", "E"]
    (collected,), source = run(collect_steps(kinds, make_config(), 3))
    assert names(collected.trees) == ["p0", "p3", "p5"]
    assert names(collected.finished_trees) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_kept"] == 3
    assert metrics["rollout/num_groups_filtered_low"] == 2
    assert metrics["rollout/num_groups_filtered_high"] == 1
    assert metrics["rollout/num_groups_started"] == 6 and metrics["rollout/num_refill_rounds"] == 1
    assert metrics["rollout/success_unfiltered"] == pytest.approx((3 * 2 + 4) / 24)
    assert sorted(source.acked) == [f"p{index}" for index in range(6)] and not source.nacked


def _expected(kinds, num_groups, num_steps):
    """Kept prompts of each step and how many were used up: the first mixed ones in order."""
    at, steps = 0, []
    for _ in range(num_steps):
        kept = []
        while len(kept) < num_groups:
            if kinds[at % len(kinds)] == "M":
                kept.append(f"p{at % len(kinds)}")
            at += 1
        steps.append(kept)
    return steps, at


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from("MEH"), min_size=3, max_size=6).filter(lambda kinds: "M" in kinds),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 1000),
)
def test_the_batch_is_the_first_accepted_groups_whatever_the_timing(
    kinds, num_groups, oversample, delays
):
    steps, num_used = _expected(kinds, num_groups, 2)
    config = make_config(num_oversampled_prompts=oversample)
    generator, tools = FakeGenerator(write, delays=delays), FakeTools(delays=delays + 1)
    results, source = run(
        collect_steps(kinds, config, num_groups, num_steps=2, generator=generator, tools=tools)
    )
    assert [names(collected.trees) for collected in results] == steps
    # No prompt is lost or comes twice: those used up are settled, the next one is next.
    assert sorted(source.acked) == sorted(f"p{at % len(kinds)}" for at in range(num_used))
    assert source.next_prompts(1)[0].prompt_id == f"p{num_used % len(kinds)}"
    plain, _ = run(collect_steps(kinds, make_config(), num_groups, num_steps=2))
    assert [one.finished_trees for one in results] == [one.finished_trees for one in plain]


def test_replacements_start_while_others_still_run():
    async def scenario():
        tools, generator = SlowTools(), FakeGenerator(write)
        source = RecordingPromptSource(make_prompts(["MS", "H", "M"]))
        groups = make_collector(source, make_config(), generator, tools, num_groups=2)
        task = asyncio.create_task(groups.collect(0))
        while not any(request.request_id.startswith("p2/") for request in generator.requests):
            await asyncio.sleep(0)
        assert not task.done()
        tools.gate.set()
        return await task

    assert names(run(scenario()).trees) == ["p0", "p2"]


def test_too_many_replacements_are_an_error_that_says_what_was_seen(monkeypatch):
    monkeypatch.setattr(module, "MAX_REFILL_ROUNDS", 2)
    tools = FakeTools()
    kinds = ["M", "E", "E", "E", "E", "H", "E", "E", "E"]
    with pytest.raises(ValueError, match="too easy for the policy") as caught:
        run(collect_steps(kinds, make_config(), 2, tools=tools))
    text = str(caught.value)
    for piece in (
        "rollout.filter_metric=accuracy: got 1 groups to train on, "
        "expected data.prompts_per_step=2",
        "after 2 rounds of replacements; of 6 finished groups 1 have a "
        "mean at or below rollout.filter_range[0]=0.01",
        "4 at or above rollout.filter_range[1]=0.99, 0 failed (means from 0 to 1, median 1)",
    ):
        assert piece in text
    assert all(session.released == 1 for session in tools.sessions)


def test_groups_that_failed_are_replaced_where_groups_are_filtered():
    def breaks(request):
        path = request.request_id.split("/")
        return (path[0] == "p0" and path[2] != "0") or (path[0] == "p1" and path[2] in "13")

    generator = FakeGenerator(write, breaks=breaks)
    (collected,), _ = run(
        collect_steps(["M", "M", "M", "M"], make_config(), 2, generator=generator)
    )
    # p0 has one good trajectory; p1's good ones are all right.
    assert names(collected.trees) == ["p2", "p3"]
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_failed"] == metrics["rollout/num_groups_filtered_high"] == 1
    everyone = make_config(filter_metric=FilterMetric.none)
    (collected,), _ = run(collect_steps(["M", "M", "M"], everyone, 2, generator=generator))
    assert names(collected.trees) == ["p0", "p1"], "without a filter failures stay, as data"


def test_stragglers_are_dropped_after_the_quorum_and_not_before():
    async def scenario(quorum):
        tools = SlowTools()
        generator = SteppedGenerator(write)
        source = RecordingPromptSource(make_prompts(["M", "MS", "M", "MS", "M"]))
        config = make_config(min_finished_fraction=quorum, straggler_timeout_s=0.05)
        groups = make_collector(source, config, generator, tools, num_groups=4)
        task = asyncio.create_task(groups.collect(0))
        done, _ = await asyncio.wait({task}, timeout=60 if quorum == 0.5 else 0.3)
        if not done:
            tools.gate.set()
        collected = await task
        assert all(session.released == 1 for session in tools.sessions)
        assert not generator.running
        return collected, source

    collected, source = run(scenario(0.5))
    assert names(collected.trees) == ["p0", "p2"]
    metrics = collected.metrics()
    assert metrics["rollout/num_stragglers"] == metrics["rollout/num_stragglers_dropped"] == 2
    assert sorted(source.acked) == ["p0", "p1", "p2", "p3"], "a straggler's prompt is used up"
    collected, source = run(scenario(0.75))
    assert names(collected.trees) == ["p0", "p1", "p2", "p3"]
    assert collected.metrics()["rollout/num_stragglers"] == 0


def test_oversampling_fills_the_batch_in_spite_of_stragglers():
    async def scenario():
        tools = SlowTools()
        source = RecordingPromptSource(make_prompts(["MS", "M", "M", "M", "M"]))
        config = make_config(num_oversampled_prompts=2, straggler_timeout_s=0.05)
        groups = make_collector(source, config, FakeGenerator(write), tools, num_groups=2)
        collected = await groups.collect(0)
        assert all(session.released == 1 for session in tools.sessions)
        return collected, source

    collected, source = run(scenario())
    assert names(collected.trees) == ["p1", "p2"]
    assert sorted(source.acked) == ["p0", "p1", "p2"] and source.nacked == ["p3"]
    assert [prompt.prompt_id for prompt in source.next_prompts(2)] == ["p3", "p4"]


def test_lockstep_groups_are_filtered_too():
    config = make_config(branching=Branching.released)
    config = replace(
        config, branch=replace(config.branch, initial_rollouts=4), num_oversampled_prompts=1
    )
    (collected,), source = run(collect_steps(["M", "E", "H", "M", "H", "M", "M"], config, 3))
    assert names(collected.trees) == ["p0", "p3", "p5"]
    assert len(source.acked) == 6


def test_a_prompt_that_fills_the_model_is_named():
    prompts = make_prompts(["M" * 600])

    async def scenario():
        groups = make_collector(
            RecordingPromptSource(prompts),
            make_config(),
            FakeGenerator(write),
            FakeTools(),
            num_groups=1,
        )
        await groups.collect(0)

    with pytest.raises(ValueError, match="prompt p0: got 601 tokens"):
        run(scenario())
