"""The batch of a step, what happens to every prompt, and groups that are carried over."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching, FilterMetric
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.groups import batch_collector as module
from mega_agentrl.rollout.groups import group
from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
from mega_agentrl.rollout.groups.filter import FilterResult
from mega_agentrl.types.records import Role
from tests.config.refusals import refused
from tests.fakes import FakeGenerator, FakeRubric, FakeTools, make_context, make_scored_tree
from tests.rollout.graded_prompts import (
    RecordingPromptSource,
    SlowTools,
    collect_steps,
    filtered_config,
    make_collector,
    make_prompts,
    names,
    run,
    write,
)
from tests.rollout.stepped_engine import SteppedGenerator
from tests.rollout.virtual_time import run_virtually


@pytest.mark.parametrize("branching", [Branching.none, Branching.after_result, Branching.released])
def test_without_filter_or_oversampling_the_trees_are_those_of_collect_rollouts(branching):
    prompts = make_prompts(["M", "E", "H", "M", "M"])
    config = RolloutConfig(group_size=4, max_response_tokens=120, branching=branching)

    async def scenario():
        generator, tools = FakeGenerator(delays=3), FakeTools(delays=4)
        groups = make_collector(
            RecordingPromptSource(prompts), config, generator, tools, num_groups=5
        )
        return await groups.collect("train-1")

    context = make_context(config, step="train-1")
    plain = run_virtually(collect_rollouts(prompts, FakeRubric(), context))
    collected = run(scenario())
    assert collected.trees == collected.finished_trees == plain


def _stalled(engine, *keys):
    """Requests of these prompts stop after 7 tokens of the second turn while `stuck` is set."""
    engine.stuck = True
    engine.stalls = lambda request, num_tokens: (
        engine.stuck
        and request.request_id.split("/")[0] in keys
        and "</result>" in "".join(map(chr, request.token_ids))
        and num_tokens == 7
    )
    return engine


def test_a_straggler_continues_with_new_weights():
    async def scenario():
        tools, engine = FakeTools(), _stalled(SteppedGenerator(write), "p0")
        source = RecordingPromptSource(make_prompts(["M", "M", "M", "E", "M"]))
        config = filtered_config(
            partial_rollout=True, min_finished_fraction=0.5, straggler_timeout_s=0.05
        )
        groups = make_collector(source, config, engine, tools, num_groups=2)
        first = await groups.collect(0)
        assert not engine.running, "nothing runs while the weights change"
        assert sum(session.released == 0 for session in tools.sessions) == 4, "its tools are open"
        state = source.state_dict()
        engine.version, engine.stuck = 2, False
        second = await groups.collect(1)
        await groups.close()
        assert all(session.released == 1 for session in tools.sessions)
        return first, second, source, state

    first, second, source, state = run(scenario())
    assert names(first.trees) == ["p1"] and names(second.trees) == ["p0", "p2"]
    metrics = first.metrics()
    assert metrics["rollout/num_groups_carried_over"] == metrics["rollout/num_stragglers"] == 1
    assert metrics["rollout/num_stragglers_dropped"] == 0
    metrics = second.metrics()
    assert metrics["rollout/num_groups_carried_in"] == metrics["rollout/carried_steps_max"] == 1
    assert 0 < metrics["rollout/stale_tokens_fraction"] < 0.5
    (carried, fresh) = second.trees
    for one in carried.trajectories:
        sampled = [v for v, mask in zip(one.versions, one.loss_mask, strict=True) if mask]
        assert sampled == sorted(sampled) and set(sampled) == {1, 2}
        turn = one.turns[2]
        assert one.versions[turn.start : turn.start + 8] == [1] * 7 + [2], "in mid-turn"
        assert one.score is not None and one.trajectory_id.startswith("p0/0/")
    assert {version for one in fresh.trajectories for version in one.versions} == {2}
    texts = [one.response_text for one in carried.trajectories]
    assert texts == [one.response_text for one in fresh.trajectories]
    assert sorted(source.acked) == ["p0", "p1", "p2"]
    # A run that resumes between the steps has lost the tokens, and no prompt.
    resumed = RecordingPromptSource(make_prompts(["M", "M", "M", "E", "M"]))
    resumed.load_state_dict(state)
    assert [prompt.prompt_id for prompt in resumed.next_prompts(3)] == ["p0", "p2", "p3"]


def test_finished_groups_behind_the_batch_are_used_first_in_the_next_step():
    async def scenario():
        engine, tools = FakeGenerator(write), FakeTools()
        source = RecordingPromptSource(make_prompts(["M", "M", "M", "M", "M"]))
        config = filtered_config(partial_rollout=True, num_oversampled_prompts=2)
        groups = make_collector(source, config, engine, tools, num_groups=1)
        first = await groups.collect(0)
        num_requests = len(engine.requests)
        engine.version = 2
        second = await groups.collect(1)
        new = {request.request_id.split("/")[0] for request in engine.requests[num_requests:]}
        await groups.close()
        assert all(session.released == 1 for session in tools.sessions)
        return first, second, new, source

    first, second, new, source = run(scenario())
    assert names(first.trees) == ["p0"] and names(second.trees) == ["p1"]
    assert first.metrics()["rollout/num_groups_carried_over"] == 2
    assert not new, "p1 had finished: the second batch was complete before it began"
    assert second.metrics()["rollout/stale_tokens_fraction"] == 1
    assert source.acked == ["p0", "p1"] and source.nacked == ["p2"]
    assert [prompt.prompt_id for prompt in source.next_prompts(2)] == ["p2", "p3"]


def test_a_group_with_a_busy_tool_cannot_be_carried(monkeypatch):
    monkeypatch.setattr(group, "PAUSE_TIMEOUT_S", 0.1)

    async def scenario():
        tools, engine = SlowTools(), FakeGenerator(write)
        source = RecordingPromptSource(make_prompts(["MS", "M", "M"]))
        config = filtered_config(
            partial_rollout=True, min_finished_fraction=0.5, straggler_timeout_s=0.02
        )
        groups = make_collector(source, config, engine, tools, num_groups=2)
        collected = await groups.collect(0)
        assert all(session.released == 1 for session in tools.sessions)
        await groups.close()
        return collected, source

    collected, source = run(scenario())
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_carried_over"] == 0
    assert metrics["rollout/num_stragglers_dropped"] == 1
    assert sorted(source.acked) == ["p0", "p1"] and not source.nacked


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from("MEH"), min_size=4, max_size=6).filter(lambda kinds: "M" in kinds),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([(1.0, 0.0), (1.0, 0.002), (0.4, 0.002)]),
    st.integers(0, 1000),
    st.sampled_from([Branching.none, Branching.after_result]),
)
def test_carrying_over_loses_no_prompt_and_mixes_no_group(
    kinds, num_groups, oversample, quorum, delays, branching
):
    async def scenario():
        tools = FakeTools(delays=delays)
        engine = SteppedGenerator(write, delays=delays + 1)
        source = RecordingPromptSource(make_prompts(kinds))
        config = filtered_config(
            partial_rollout=True,
            num_oversampled_prompts=oversample,
            min_finished_fraction=quorum[0],
            straggler_timeout_s=quorum[1],
            branching=branching,
        )
        groups = make_collector(source, config, engine, tools, num_groups=num_groups)
        results = []
        for step in range(4):
            results.append(await groups.collect(step))
            assert not engine.running
            waiting = source.state_dict()["in_flight"]
            num_carried = results[-1].group_counts["num_groups_carried_over"]
            assert len(waiting) == num_carried <= num_groups + oversample
            engine.version += 1
        await groups.close()
        assert all(session.released == 1 for session in tools.sessions)
        return results, source

    results, source = run(scenario())
    for step, collected in enumerate(results):
        assert 1 <= len(collected.trees) <= num_groups
        assert collected.version == step + 1
        for tree in collected.trees:
            assert len(tree.trajectories) == 4
            ids = {one.trajectory_id.rsplit("/", 1)[0] for one in tree.trajectories}
            assert len(ids) == 1, "one prompt of one step"
            for one in tree.trajectories:
                assert not one.failed and max(one.versions) <= collected.version
    state = source.state_dict()
    assert not state["in_flight"]
    num_taken = state["stream"]["epoch"] * len(kinds) + state["stream"]["position"]
    assert len(source.acked) + len(state["requeued"]) == num_taken


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"partial_rollout": True}, id="partial rollout"),
        pytest.param({"branching": Branching.released}, id="lockstep"),
    ],
)
def test_cancelling_at_any_moment_leaves_no_task_or_session(num_turns, changes):
    async def scenario():
        tools, generator = FakeTools(delays=1), SteppedGenerator(write, delays=2)
        source = RecordingPromptSource(make_prompts(["M", "E", "H", "M", "M", "E"]))
        config = filtered_config(num_oversampled_prompts=1, **changes)
        groups = make_collector(source, config, generator, tools, num_groups=3)
        task = asyncio.create_task(groups.collect(0))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait({task})
        await groups.close()
        assert not generator.running
        assert all(session.released == 1 for session in tools.sessions)
        if not was_done:
            # Nothing counts as used: whoever resumes gets them all again, in order.
            resumed = RecordingPromptSource(source._prompts)
            resumed.load_state_dict(source.state_dict())
            assert resumed.next_prompts(1)[0].prompt_id == "p0"

    run(scenario())


def test_a_bug_arrives_as_itself_and_nothing_stays_open():
    class Broken(FakeRubric):
        def score(self, trajectory):
            raise KeyError("wrong_name")

    async def scenario(tools, rubric=None):
        source = RecordingPromptSource(make_prompts("MMMMMM"))
        engine = FakeGenerator(write, delays=2)
        groups = make_collector(
            source, filtered_config(), engine, tools, num_groups=3, rubric=rubric
        )
        try:
            await groups.collect(0)
        finally:
            assert all(session.released == 1 for session in tools.sessions)

    with pytest.raises(KeyError) as caught:
        run(scenario(FakeTools(delays=1), Broken()))
    assert caught.value.args == ("wrong_name",)
    with pytest.raises(ZeroDivisionError):
        run(scenario(FakeTools(answer=lambda text: 1 / 0)))


def test_filtered_groups_are_replaced_and_counted():
    kinds = ["M", "E", "H", "M", "H", "M", "M", "E"]
    (collected,), source = run(collect_steps(kinds, filtered_config(), 3))
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
    config = filtered_config(num_oversampled_prompts=oversample)
    generator, tools = FakeGenerator(write, delays=delays), FakeTools(delays=delays + 1)
    results, source = run(
        collect_steps(kinds, config, num_groups, num_steps=2, generator=generator, tools=tools)
    )
    assert [names(collected.trees) for collected in results] == steps
    # No prompt is lost or comes twice: those used up are settled, the next one is next.
    assert sorted(source.acked) == sorted(f"p{at % len(kinds)}" for at in range(num_used))
    assert source.next_prompts(1)[0].prompt_id == f"p{num_used % len(kinds)}"
    plain, _ = run(collect_steps(kinds, filtered_config(), num_groups, num_steps=2))
    assert [one.finished_trees for one in results] == [one.finished_trees for one in plain]


def test_replacements_start_while_others_still_run():
    async def scenario():
        tools, generator = SlowTools(), FakeGenerator(write)
        source = RecordingPromptSource(make_prompts(["MS", "H", "M"]))
        groups = make_collector(source, filtered_config(), generator, tools, num_groups=2)
        task = asyncio.create_task(groups.collect(0))
        while not any(request.request_id.startswith("p2/") for request in generator.requests):
            await asyncio.sleep(0)
        assert not task.done()
        tools.gate.set()
        return await task

    assert names(run(scenario()).trees) == ["p0", "p2"]


def test_too_many_replacements_are_an_error_with_the_counts_of_what_was_filtered(monkeypatch):
    monkeypatch.setattr(module, "MAX_REFILL_ROUNDS", 2)
    tools = FakeTools()
    kinds = ["M", "E", "E", "E", "E", "H", "E", "E", "E"]
    error = refused(lambda: run(collect_steps(kinds, filtered_config(), 2, tools=tools)))
    assert (error.key, error.got) == ("rollout.filter_metric", FilterMetric.accuracy)
    assert "too easy" in error.cause
    text = error.expected.replace("filter_range[0]", "low").replace("filter_range[1]", "high")
    wanted, rounds, accepted, finished, *filtered = map(float, re.findall(r"\d[.\d]*", text))
    assert (accepted, wanted, rounds, finished) == (1, 2, 2, 6)
    # 1 below the low bound, 4 above the high one, 0 failed; smallest, largest and median mean.
    assert filtered == [1, 0.01, 4, 0.99, 0, 0, 1, 1]
    assert all(session.released == 1 for session in tools.sessions)


def test_groups_that_failed_are_replaced_where_groups_are_filtered():
    def breaks(request):
        path = request.request_id.split("/")
        return (path[0] == "p0" and path[2] != "0") or (path[0] == "p1" and path[2] in "13")

    generator = FakeGenerator(write, breaks=breaks)
    (collected,), _ = run(collect_steps("MMMM", filtered_config(), 2, generator=generator))
    # p0 has one good trajectory; p1's good ones are all right.
    assert names(collected.trees) == ["p2", "p3"]
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_failed"] == metrics["rollout/num_groups_filtered_high"] == 1
    everyone = filtered_config(filter_metric=FilterMetric.none)
    (collected,), _ = run(collect_steps(["M", "M", "M"], everyone, 2, generator=generator))
    assert names(collected.trees) == ["p0", "p1"], "without a filter failures stay, as data"


def test_stragglers_are_dropped_after_the_quorum_and_not_before():
    async def scenario(quorum):
        tools = SlowTools()
        generator = SteppedGenerator(write)
        source = RecordingPromptSource(make_prompts(["M", "MS", "M", "MS", "M"]))
        config = filtered_config(min_finished_fraction=quorum, straggler_timeout_s=0.05)
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
        config = filtered_config(num_oversampled_prompts=2, straggler_timeout_s=0.05)
        groups = make_collector(source, config, FakeGenerator(write), tools, num_groups=2)
        collected = await groups.collect(0)
        assert all(session.released == 1 for session in tools.sessions)
        return collected, source

    collected, source = run(scenario())
    assert names(collected.trees) == ["p1", "p2"]
    assert sorted(source.acked) == ["p0", "p1", "p2"] and source.nacked == ["p3"]
    assert [prompt.prompt_id for prompt in source.next_prompts(2)] == ["p3", "p4"]


def test_lockstep_groups_are_filtered_too():
    branch = BranchConfig(initial_rollouts=4)
    config = filtered_config(branching=Branching.released, branch=branch, num_oversampled_prompts=1)
    (collected,), source = run(collect_steps(["M", "E", "H", "M", "H", "M", "M"], config, 3))
    assert names(collected.trees) == ["p0", "p3", "p5"]
    assert len(source.acked) == 6


def test_a_prompt_that_fills_the_model_is_named():
    with pytest.raises(InputError) as caught:
        run(collect_steps(["M" * 600], filtered_config(), 1))
    assert (caught.value.name, caught.value.got) == ("tokens of prompt p0", 601)


def test_batch_metrics_count_filtered_groups_and_stale_tokens():
    spans = [(Role.assistant, 1), (Role.tool, 1), (Role.assistant, 1)]
    mixed = make_scored_tree(1, 0, None, spans=spans, versions=[2, 0, 3])
    wrong, right = make_scored_tree(0, 0, spans=spans), make_scored_tree(1, 1, spans=spans)
    collected = RolloutBatch(
        trees=[mixed],
        finished_trees=[wrong, mixed, right],
        filter_results=[FilterResult.below_range, FilterResult.accepted, FilterResult.above_range],
        version=3,
        group_counts={"num_stragglers": 4},
    )
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_kept"] == 1
    for name in ("low", "high"):
        assert metrics[f"rollout/num_groups_filtered_{name}"] == 1
    assert metrics["rollout/num_groups_failed"] == 0 and metrics["rollout/num_stragglers"] == 4
    assert metrics["rollout/success_unfiltered"] == metrics["rollout/reward_unfiltered"] == 3 / 6
    # Of each trajectory's two sampled tokens one has the version before.
    assert metrics["rollout/stale_tokens_fraction"] == 0.5
    assert metrics["rollout/staleness_mean"] == 0.5 and metrics["rollout/staleness_max"] == 1
    # A step that begins one version later finds them all one version older.
    later = replace(collected, version=4).metrics()
    assert later["rollout/stale_tokens_fraction"] == 1
    assert later["rollout/staleness_mean"] == 1.5 and later["rollout/staleness_max"] == 2


def test_an_empty_batch_has_zeros_and_a_filter_result_needs_its_tree():
    empty = {"trees": [], "finished_trees": [], "version": 1, "group_counts": {}}
    assert set(RolloutBatch(filter_results=[], **empty).metrics().values()) == {0.0}
    with pytest.raises(InputError) as caught:
        RolloutBatch(filter_results=[FilterResult.accepted], **empty)
    assert (caught.value.name, caught.value.got) == ("number of filter results", 1)
