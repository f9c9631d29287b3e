"""`rollout.group`: when a group rests, and that an ended one leaves nothing."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.choices import Branching
from mega_agentrl.rollout import group as module
from mega_agentrl.rollout.collector import make_context
from mega_agentrl.rollout.filter import Verdict
from mega_agentrl.rollout.group import end_groups, hold_groups, start_group, start_rounds
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools
from tests.rollout.graded_prompts import SlowTools, make_config, make_prompts, write
from tests.rollout.stepped_engine import SteppedGenerator
from tests.rollout.virtual_time import run_virtually


def _context(generator, tools, **changes):
    return make_context(
        generator=generator,
        tools=tools,
        codec=CharCodec(),
        config=make_config(**changes),
        max_model_len=500,
        seed=1,
        step=0,
    )


def _start(context, kind="M"):
    return start_group(context, make_prompts([kind])[0], "p0", FakeRubric())


def test_a_finished_group_gets_a_scored_tree_and_a_verdict():
    async def scenario():
        context = _context(FakeGenerator(write), FakeTools())
        group = _start(context)
        assert not group.kept and not group.rests
        await asyncio.wait({group.task})
        group.finish(context)
        return group

    group = run_virtually(scenario())
    assert group.verdict is Verdict.kept and group.kept
    assert [one.score.correct for one in group.tree.trajectories] == [True, False, True, False]


@pytest.mark.parametrize("num_turns", [0, 1, 4, 9, 25])
def test_a_held_group_rests_until_it_goes_on_and_is_the_same(num_turns):
    async def scenario(hold):
        engine, tools = SteppedGenerator(write), FakeTools()
        group = _start(_context(engine, tools, carry_over=True))
        if hold:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await hold_groups([group])
            assert group.rests and not engine.running and not group.task.done()
            await asyncio.sleep(0.01)
            assert group.rests, "and it stays at rest"
            group.go_on()
        await asyncio.wait({group.task})
        assert not group.rests and all(session.released == 1 for session in tools.sessions)
        return [one.response_text for one in group.tree.trajectories]

    assert run_virtually(scenario(hold=True)) == asyncio.run(scenario(hold=False))


def test_a_busy_tool_keeps_a_group_from_resting(monkeypatch):
    monkeypatch.setattr(module, "HOLD_S", 0.1)

    async def scenario():
        tools = SlowTools()
        group = _start(_context(FakeGenerator(write), tools, carry_over=True), "MS")
        await asyncio.sleep(0)
        group.go_on()
        while not tools.sessions or len(group.generator._generator.requests) < 4:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await hold_groups([group])
        assert not group.rests and not group.task.done()
        await end_groups([group])
        assert all(session.released == 1 for session in tools.sessions)

    run_virtually(scenario())


def test_only_groups_that_may_be_carried_have_a_gate():
    async def scenario():
        group = _start(_context(FakeGenerator(write), FakeTools()))
        assert group.generator is None
        await end_groups([group])

    run_virtually(scenario())


@pytest.mark.parametrize("num_turns", [0, 1, 3, 10, 40])
def test_ended_groups_leave_no_task(num_turns):
    async def scenario():
        tools, engine = FakeTools(delays=1), SteppedGenerator(write, delays=2)
        rounds = _context(engine, tools, branching=Branching.released)
        prompts = make_prompts(["M", "E"])
        groups = start_rounds(rounds, prompts, ["a", "b"], FakeRubric())
        groups.append(_start(_context(engine, tools)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert await end_groups(groups) is None
        assert asyncio.all_tasks() == {asyncio.current_task()} and not engine.running
        assert all(session.released == 1 for session in tools.sessions)

    run_virtually(scenario())


def test_a_bug_is_raised_itself_and_told_when_groups_end():
    async def scenario():
        tools = FakeTools(answer=lambda text: 1 / 0)
        group = _start(_context(FakeGenerator(write), tools))
        await asyncio.wait({group.task})
        with pytest.raises(ZeroDivisionError):
            _ = group.tree
        return await end_groups([group])

    assert isinstance(run_virtually(scenario()), ZeroDivisionError)
