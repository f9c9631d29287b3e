"""Collection over several steps: carried groups, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.groups import group
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools
from tests.rollout.graded_prompts import (
    RecordingPromptSource,
    SlowTools,
    make_collector,
    make_config,
    make_prompts,
    names,
    run,
    write,
)
from tests.rollout.stepped_engine import SteppedGenerator
from tests.rollout.virtual_time import run_virtually


@pytest.mark.parametrize("branching", [Branching.none, Branching.after_result, Branching.released])
def test_without_any_of_it_the_trees_are_those_of_collect(branching):
    prompts = make_prompts(["M", "E", "H", "M", "M"])
    config = RolloutConfig(group_size=4, max_response_tokens=120, branching=branching)

    async def scenario():
        generator, tools = FakeGenerator(delays=3), FakeTools(delays=4)
        groups = make_collector(
            RecordingPromptSource(prompts), config, generator, tools, num_groups=5
        )
        return await groups.collect("train-1")

    plain = run_virtually(
        collect_rollouts(
            prompts,
            generator=FakeGenerator(),
            tools=FakeTools(),
            codec=CharCodec(),
            rubric=FakeRubric(),
            config=config,
            max_model_len=500,
            seed=1,
            step="train-1",
        )
    )
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


def test_a_straggler_goes_on_with_new_weights_where_it_was():
    async def scenario():
        tools, engine = FakeTools(), _stalled(SteppedGenerator(write), "p0")
        source = RecordingPromptSource(make_prompts(["M", "M", "M", "E", "M"]))
        config = make_config(
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
    assert (
        first.metrics()["rollout/num_groups_carried_over"]
        == first.metrics()["rollout/num_stragglers"]
        == 1
    )
    assert first.metrics()["rollout/num_stragglers_dropped"] == 0
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
        groups = make_collector(
            source,
            make_config(partial_rollout=True, num_oversampled_prompts=2),
            engine,
            tools,
            num_groups=1,
        )
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
        config = make_config(
            partial_rollout=True, min_finished_fraction=0.5, straggler_timeout_s=0.02
        )
        groups = make_collector(source, config, engine, tools, num_groups=2)
        collected = await groups.collect(0)
        assert all(session.released == 1 for session in tools.sessions)
        await groups.close()
        return collected, source

    collected, source = run(scenario())
    metrics = collected.metrics()
    assert (
        metrics["rollout/num_groups_carried_over"] == 0
        and metrics["rollout/num_stragglers_dropped"] == 1
    )
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
        config = make_config(
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
@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("branching", [Branching.none, Branching.released])
def test_cancelling_at_any_moment_leaves_nothing(num_turns, partial_rollout, branching):
    async def scenario():
        tools, generator = FakeTools(delays=1), SteppedGenerator(write, delays=2)
        source = RecordingPromptSource(make_prompts(["M", "E", "H", "M", "M", "E"]))
        rounds = branching is Branching.released
        config = make_config(branching=branching, num_oversampled_prompts=1)
        if partial_rollout and not rounds:
            config = replace(config, partial_rollout=True)
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

    async def scenario(**changes):
        tools = changes.pop("tools", FakeTools(delays=1))
        groups = make_collector(
            RecordingPromptSource(make_prompts(["M"] * 6)),
            make_config(),
            FakeGenerator(write, delays=2),
            tools,
            num_groups=3,
            **changes,
        )
        try:
            await groups.collect(0)
        finally:
            assert all(session.released == 1 for session in tools.sessions)

    with pytest.raises(KeyError, match="wrong_name"):
        run(scenario(rubric=Broken()))
    with pytest.raises(ZeroDivisionError):
        run(scenario(tools=FakeTools(answer=lambda text: 1 / 0)))
