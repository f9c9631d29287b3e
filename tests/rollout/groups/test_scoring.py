"""Pending scores: who waits for them, and what a missing reward means."""

import asyncio
from concurrent.futures import Future

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.rollout.groups.filter import FilterResult
from mega_agentrl.rollout.groups.scoring import (
    cancel_scores,
    resolve_scores,
    start_scores,
    wait_for_scores,
)
from mega_agentrl.types.errors import RewardError
from mega_agentrl.types.records import RolloutTree, Score, StopReason
from tests.fakes import FakeGenerator, FakeRubric, FakeTools, make_trajectory
from tests.rollout.graded_prompts import (
    RecordingPromptSource,
    filtered_config,
    make_collector,
    make_prompts,
    run,
    write,
)


def score(value):
    return Score(value=value, correct=value > 0, f1=0.0, answer="", reason="")


class Later(FakeRubric):
    """Gives futures; those of trajectories whose path is in `at_once` are scores."""

    def __init__(self, at_once=()):
        self.at_once, self.futures = at_once, []

    def score(self, trajectory):
        if trajectory.path in self.at_once:
            return super().score(trajectory)
        self.futures.append(Future())
        return self.futures[-1]


def tree(*reasons):
    rows = [make_trajectory((index,), stop_reason=one) for index, one in enumerate(reasons)]
    return RolloutTree(prompt=rows[0].prompt, trajectories=rows)


def test_known_scores_are_recorded_and_pending_ones_returned():
    grown, rubric = tree(StopReason.eos, StopReason.eos, StopReason.aborted), Later({(0,)})
    pending = start_scores(grown, rubric)
    first, second, third = grown.trajectories
    assert first.score is not None and second.score is None and third.score is None
    assert [one.trajectory for one in pending] == [second]
    rubric.futures[0].set_result(score(2.0))
    resolve_scores(pending)
    resolve_scores(pending)
    assert second.score.value == 2.0 and not second.failed


@pytest.mark.parametrize(
    "waits", [resolve_scores, lambda pending: asyncio.run(wait_for_scores(pending))]
)
def test_a_reward_that_cannot_be_had_fails_the_trajectory_and_no_other(waits):
    grown, rubric = tree(*[StopReason.eos] * 3), Later()
    pending = start_scores(grown, rubric)
    rubric.futures[0].set_exception(RewardError("it hung"))
    rubric.futures[1].cancel()
    rubric.futures[2].set_result(score(1.0))
    waits(pending)
    assert [one.failed for one in grown.trajectories] == [True, True, False]
    assert grown.trajectories[0].reward_error == "it hung"
    assert grown.trajectories[0].score is None


def test_a_bug_is_raised():
    rubric = Later()
    pending = start_scores(tree(StopReason.eos), rubric)
    bug = KeyError("bug")
    rubric.futures[0].set_exception(bug)
    with pytest.raises(KeyError) as caught:
        resolve_scores(pending)
    assert caught.value is bug


def test_cancelled_scores_cancel_their_futures():
    rubric = Later()
    cancel_scores(start_scores(tree(StopReason.eos, StopReason.eos), rubric))
    assert all(future.cancelled() for future in rubric.futures)


def collector(rubric, filter_metric, **changes):
    source = RecordingPromptSource(make_prompts("MMM"))
    config = filtered_config(filter_metric=filter_metric, **changes)
    engine, tools = FakeGenerator(write), FakeTools()
    return make_collector(source, config, engine, tools, num_groups=2, rubric=rubric)


def test_without_a_filter_the_batch_does_not_wait_for_scores():
    rubric = Later({(0,)})

    async def scenario():
        groups = collector(rubric, FilterMetric.none)
        collected = await groups.collect(0)
        await groups.close()
        return collected

    collected = run(scenario())
    assert len(collected.pending_scores) == len(rubric.futures) == 6
    assert not any(future.done() for future in rubric.futures)
    for number, future in enumerate(rubric.futures):
        future.set_result(score(float(number)))
    resolve_scores(collected.pending_scores)
    values = sorted(
        one.score.value for tree in collected.finished_trees for one in tree.trajectories[1:]
    )
    assert values == [0, 1, 2, 3, 4, 5]
    assert collected.metrics()["rollout/reward_unfiltered"] > 0


def test_with_a_filter_a_group_waits_for_its_scores():
    rubric = Later()

    async def scenario():
        groups = collector(rubric, FilterMetric.reward, filter_range=[0.0, 10.0])
        collecting = asyncio.create_task(groups.collect(0))
        while len(rubric.futures) < 8:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert not collecting.done()
        for number, future in enumerate(rubric.futures):
            if number == 5:
                future.set_exception(RewardError("down"))
            else:
                future.set_result(score(1.0))
        collected = await collecting
        await groups.close()
        return collected

    collected = run(scenario())
    assert collected.pending_scores == []
    assert list(collected.filter_results) == [FilterResult.accepted] * 2
    assert sum(one.failed for tree in collected.trees for one in tree.trajectories) == 1


@pytest.mark.parametrize("filter_metric", [FilterMetric.none, FilterMetric.reward])
def test_groups_that_are_not_needed_cancel_their_scores(filter_metric):
    """Cancelling where a group waits for them, and dropping one that the batch did not reach."""
    rubric = Later()

    async def scenario():
        groups = collector(
            rubric, filter_metric, num_oversampled_prompts=1, filter_range=[-1.0, 10.0]
        )
        collecting = asyncio.create_task(groups.collect(0))
        while len(rubric.futures) < 12 and not collecting.done():
            await asyncio.sleep(0.001)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await groups.close()

    run(scenario())
    if filter_metric is FilterMetric.reward:
        assert all(future.cancelled() for future in rubric.futures)
