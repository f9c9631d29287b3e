"""The greedy trajectory does not change its group, and its failure is counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mega_agentrl.rollout.collector import make_rollout_context
from mega_agentrl.rollout.groups.greedy import greedy_metrics
from mega_agentrl.rollout.groups.group import cancel_groups, pause_groups, start_group
from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.types.records import RolloutTree, Score
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools
from tests.rollout.bare_trajectory import bare_trajectory
from tests.rollout.graded_prompts import make_config, make_prompts, write
from tests.rollout.stepped_engine import SteppedGenerator
from tests.rollout.virtual_time import run_virtually


def _grow(generator, *, with_greedy, pause=False, tools=None, **changes):
    """The finished group of a prompt that half of the paths solve."""
    tools = tools or FakeTools()

    async def scenario():
        context = make_rollout_context(
            generator=generator,
            tools=tools,
            codec=CharCodec(),
            config=make_config(**changes),
            max_model_len=500,
            seed=1,
            step="train-3",
            with_greedy=with_greedy,
        )
        group = start_group(context, make_prompts(["M"])[0], "p0", FakeRubric())
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


def test_the_group_is_the_same_with_and_without():
    generator = FakeGenerator(write)
    tree, alone = (
        _grow(generator, with_greedy=True),
        _grow(FakeGenerator(write), with_greedy=False),
    )
    assert alone.greedy_trajectory is None
    assert tree.trajectories == alone.trajectories
    assert tree.greedy_trajectory.score is not None
    assert tree.all_trajectories == [*tree.trajectories, tree.greedy_trajectory]
    by_heat = {request.temperature: 0 for request in generator.requests}
    assert set(by_heat) == {0.0, 1.0}
    greedy = [one for one in generator.requests if one.temperature == 0]
    assert {one.request_id.split("/")[1] for one in greedy} == {"train-3-greedy"}
    assert {(one.top_p, one.top_k) for one in greedy} == {(1.0, 0)}


def test_a_paused_group_waits_for_its_greedy_trajectory_too():
    paused = _grow(SteppedGenerator(write), with_greedy=True, pause=True, partial_rollout=True)
    free = _grow(SteppedGenerator(write), with_greedy=True, partial_rollout=True)
    assert paused.greedy_trajectory.response_text == free.greedy_trajectory.response_text
    assert paused.trajectories == free.trajectories


def test_its_failure_is_data_and_counted():
    tree = _grow(FakeGenerator(write, breaks=lambda one: one.temperature == 0), with_greedy=True)
    assert tree.greedy_trajectory.failed and tree.greedy_trajectory.score is None
    assert not any(one.failed for one in tree.trajectories)
    assert rollout_metrics([tree])["rollout/greedy_failed"] == 1.0


def test_a_cancelled_group_leaves_no_greedy_trajectory_behind():
    async def scenario():
        tools = FakeTools()
        context = make_rollout_context(
            generator=SteppedGenerator(write),
            tools=tools,
            codec=CharCodec(),
            config=make_config(),
            max_model_len=500,
            seed=1,
            step=0,
            with_greedy=True,
        )
        group = start_group(context, make_prompts(["M"])[0], "p0", FakeRubric())
        await asyncio.sleep(0.01)
        assert await cancel_groups([group]) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tools

    assert all(session.released == 1 for session in run_virtually(scenario()).sessions)


def test_metrics_by_hand():
    prompt = make_prompts(["M"])[0]
    tokens = {name: [0] * 3 for name in ("token_ids", "logps", "entropies", "versions", "turn_ids")}
    score = Score(value=0.5, correct=True, f1=1.0, answer="", reason="")
    good = bare_trajectory(loss_mask=[1, 0, 1], score=score, **tokens)
    lost = bare_trajectory(loss_mask=[1, 1, 1], reward_error="nobody knows", **tokens)
    trees = [
        RolloutTree(prompt=prompt, trajectories=[], greedy_trajectory=one) for one in (good, lost)
    ]
    found = greedy_metrics(trees)
    assert found["greedy_reward"] == 0.5 and found["greedy_success"] == 1.0
    assert found["greedy_failed"] == 0.5
    assert (found["greedy_tokens"], found["greedy_calls"]) == (5.0, 0.0)
    assert greedy_metrics([replace(trees[0], greedy_trajectory=None)]) == {}
