"""Groups: pausing, cancelling, and the greedy trajectory beside them."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.rollout.groups import group as module
from mega_agentrl.rollout.groups.filter import FilterResult
from mega_agentrl.rollout.groups.group import (
    cancel_groups,
    pause_groups,
    start_group,
    start_lockstep_groups,
)
from tests.fakes import FakeGenerator, FakeRubric, FakeTools, make_context
from tests.rollout.graded_prompts import SlowTools, filtered_config, make_prompts, write
from tests.rollout.stepped_engine import SteppedGenerator
from tests.rollout.virtual_time import run_virtually


def _context(generator, tools, *, with_greedy=False, **changes):
    config = filtered_config(**changes)
    return make_context(config, generator=generator, tools=tools, with_greedy=with_greedy)


def _start(context, kind="M"):
    return start_group(context, make_prompts([kind])[0], "p0", FakeRubric())


def test_a_finished_group_gets_a_scored_tree_and_a_filter_result():
    async def scenario():
        context = _context(FakeGenerator(write), FakeTools())
        group = _start(context)
        assert not group.is_accepted and not group.is_paused
        await asyncio.wait({group.task})
        group.apply_filter(context)
        return group

    group = run_virtually(scenario())
    assert group.filter_result is FilterResult.accepted and group.is_accepted
    assert [one.score.correct for one in group.tree.trajectories] == [True, False, True, False]


@pytest.mark.parametrize("num_turns", [0, 1, 4, 9, 25])
def test_a_paused_group_resumes_and_is_the_same(num_turns):
    async def scenario(pause):
        engine, tools = SteppedGenerator(write), FakeTools()
        group = _start(_context(engine, tools, partial_rollout=True))
        if pause:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await pause_groups([group])
            assert group.is_paused and not engine.running and not group.task.done()
            await asyncio.sleep(0.01)
            assert group.is_paused, "it stays paused"
            group.resume()
        await asyncio.wait({group.task})
        assert not group.is_paused and all(session.released == 1 for session in tools.sessions)
        return [one.response_text for one in group.tree.trajectories]

    assert run_virtually(scenario(pause=True)) == asyncio.run(scenario(pause=False))


def test_a_busy_tool_keeps_a_group_from_pausing(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_TIMEOUT_S", 0.1)

    async def scenario():
        tools = SlowTools()
        group = _start(_context(FakeGenerator(write), tools, partial_rollout=True), "MS")
        await asyncio.sleep(0)
        group.resume()
        while not tools.sessions or len(group.generator._generator.requests) < 4:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await pause_groups([group])
        assert not group.is_paused and not group.task.done()
        await cancel_groups([group])
        assert all(session.released == 1 for session in tools.sessions)

    run_virtually(scenario())


@pytest.mark.parametrize("num_turns", [0, 1, 3, 10, 40])
def test_cancelled_groups_leave_no_task(num_turns):
    async def scenario():
        tools, engine = FakeTools(delays=1), SteppedGenerator(write, delays=2)
        lockstep = _context(engine, tools, branching=Branching.released)
        prompts = make_prompts(["M", "E"])
        groups = start_lockstep_groups(lockstep, prompts, ["a", "b"], FakeRubric())
        groups.append(_start(_context(engine, tools)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert await cancel_groups(groups) is None
        assert asyncio.all_tasks() == {asyncio.current_task()} and not engine.running
        assert all(session.released == 1 for session in tools.sessions)

    run_virtually(scenario())


def test_a_bug_is_raised_as_itself_and_returned_by_cancel():
    async def scenario():
        tools = FakeTools(answer=lambda text: 1 / 0)
        group = _start(_context(FakeGenerator(write), tools))
        await asyncio.wait({group.task})
        with pytest.raises(ZeroDivisionError):
            _ = group.tree
        return await cancel_groups([group])

    assert isinstance(run_virtually(scenario()), ZeroDivisionError)


def _grow(generator, *, with_greedy=True, pause=False, **changes):
    """The finished tree of a prompt that half of the paths solve."""
    tools = FakeTools()

    async def scenario():
        group = _start(_context(generator, tools, with_greedy=with_greedy, **changes))
        if pause:
            await asyncio.sleep(0)
            await pause_groups([group])
            assert group.is_paused
            group.resume()
        await asyncio.wait({group.task})
        assert not group.is_paused
        return group

    group = run_virtually(scenario())
    assert all(session.released == 1 for session in tools.sessions)
    return group.tree


def test_the_group_is_the_same_with_and_without_a_greedy_trajectory():
    generator = FakeGenerator(write)
    tree, alone = _grow(generator), _grow(FakeGenerator(write), with_greedy=False)
    assert alone.greedy_trajectory is None
    assert tree.trajectories == alone.trajectories
    assert tree.greedy_trajectory.score is not None
    assert tree.all_trajectories == [*tree.trajectories, tree.greedy_trajectory]
    assert {request.temperature for request in generator.requests} == {0.0, 1.0}
    greedy = [one for one in generator.requests if one.temperature == 0]
    assert {one.request_id.split("/")[1] for one in greedy} == {"0-greedy"}
    assert {(one.top_p, one.top_k) for one in greedy} == {(1.0, 0)}


def test_a_paused_group_waits_for_its_greedy_trajectory_too():
    paused = _grow(SteppedGenerator(write), pause=True, partial_rollout=True)
    free = _grow(SteppedGenerator(write), partial_rollout=True)
    assert paused.greedy_trajectory.response_text == free.greedy_trajectory.response_text
    assert paused.trajectories == free.trajectories


def test_a_greedy_trajectory_fails_alone():
    tree = _grow(FakeGenerator(write, breaks=lambda one: one.temperature == 0))
    assert tree.greedy_trajectory.failed and tree.greedy_trajectory.score is None
    assert not any(one.failed for one in tree.trajectories)


def test_a_cancelled_group_leaves_no_greedy_trajectory_behind():
    async def scenario():
        tools = FakeTools()
        group = _start(_context(SteppedGenerator(write), tools, with_greedy=True))
        await asyncio.sleep(0.01)
        assert await cancel_groups([group]) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tools

    assert all(session.released == 1 for session in run_virtually(scenario()).sessions)
