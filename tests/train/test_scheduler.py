"""Rollouts ahead of the step that learns: who waits for whom, how old tokens are, how it ends."""

import asyncio
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.sections.runtime import WeightSyncConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
from mega_agentrl.runtime.event_loop_thread import EventLoopThread
from mega_agentrl.train.scheduler import AsyncRolloutScheduler, open_rollout_scheduler
from mega_agentrl.train.signals import RunInterrupted, SignalHandler
from mega_agentrl.train.trainer import train
from mega_agentrl.types.errors import RankLostError
from tests.fakes import FakeGenerator
from tests.rollout.stepped_engine import HeldGenerator, SteppedGenerator
from tests.train.conftest import FakePolicy
from tests.train.interruptible_run import Killed, Moments, die, interruptible_config, outcome, start
from tests.train.metric_lines import metric_lines

DEADLINE_S = 120
pytestmark = pytest.mark.usefixtures("bare_runs")
extended = pytest.mark.extended


def steps_of(components, config, *, staleness, **changes):
    """The metrics of each RL step of a run; what is left in its loop must be nothing."""
    folder = Path(config.run_dir) / f"stale-{staleness}-{len(changes)}"
    rollout = replace(config.rollout, max_staleness=staleness, **changes)
    config = replace(config, run_dir=str(folder), total_steps=5, rollout=rollout)

    async def num_tasks():
        return len(asyncio.all_tasks())

    with EventLoopThread() as thread:
        components = replace(
            components,
            policy=FakePolicy() if components.policy.calls else components.policy,
            prompt_source=PromptSampler(components.validation_prompts, seed=1),
            run_coroutine=thread.run,
        )
        components.generator.version = 0
        try:
            train(components, config)
        finally:
            # An EventLoopThread keeps one task of its own.
            assert thread.run(num_tasks()) == 2
            assert all(one.released == 1 for one in components.tools.sessions)
    return metric_lines(folder, "rl")


def without_ages(lines):
    """What rollouts give and the weights do not change."""
    names = ("rollout/reward", "rollout/success", "rollout/num_groups", "rollout/response")
    return [{k: v for k, v in line.items() if k.startswith(names)} for line in lines]


class FakeCollector:
    """Collections that end at once, or when their step is in `gates`' events; notes beginnings."""

    def __init__(self, gates=()):
        self.begun, self.acked = [], []
        self.gates = {step: asyncio.Event() for step in gates}
        self.num_sent = 0

    async def collect_unacked(self, step, *, max_version_lag):
        number = int(step.removeprefix("train-"))
        self.begun.append((number, self.num_sent, max_version_lag))
        if number in self.gates:
            await self.gates[number].wait()
        return RolloutBatch(
            trees=[], finished_trees=[], filter_results=[], version=0, group_counts={"step": number}
        )

    def ack(self, rollout_batch):
        self.acked.append(rollout_batch.group_counts["step"])


def make_scheduler(components, collector, runner, **changes):
    components = replace(components, run_coroutine=runner.run)
    values = {"staleness": 2, "num_done": 0, "num_steps": 5, "interruptible_generator": None}
    return AsyncRolloutScheduler(components, collector, SignalHandler(), **(values | changes))


def test_a_collection_begins_as_soon_as_the_bound_allows(components):
    collector = FakeCollector()
    with asyncio.Runner() as runner:
        scheduler = make_scheduler(components, collector, runner)
        for step in range(1, 6):
            assert scheduler.collect(step).group_counts == {"step": step}
            scheduler.wait_before_weight_sync()
            collector.num_sent = step
            scheduler.on_weights_synced(step)
        scheduler.close()
    # (step, updates sent at its beginning, versions that a kept tree may be older than these)
    assert collector.begun == [(1, 0, 2), (2, 0, 1), (3, 0, 0), (4, 1, 0), (5, 2, 0)]
    assert collector.acked == [1, 2, 3, 4, 5]


def test_the_bound_limits_the_collections_under_way_and_the_end_leaves_none(components):
    async def open_gate(collector, step):
        collector.gates[step].set()
        for _ in range(20):
            await asyncio.sleep(0)
        return [step for step, *_ in collector.begun]

    with asyncio.Runner() as runner:
        collector = FakeCollector(gates=(8, 9, 10, 11))
        scheduler = make_scheduler(components, collector, runner, num_done=7, num_steps=12)
        begun = runner.run(open_gate(collector, 8))
        assert begun == [], "nothing begins before somebody asks"
        assert scheduler.collect(8).group_counts == {"step": 8}
        assert runner.run(open_gate(collector, 9)) == [8, 9, 10]
        assert collector.acked == [8], "until a step is taken a checkpoint gives its prompts again"
        scheduler.close()
        scheduler.close()
        scheduler.on_weights_synced(9)
        assert [step for step, *_ in collector.begun] == [8, 9, 10]


@pytest.mark.parametrize("filtered", [False, True])
def test_with_weights_that_stay_every_staleness_gives_the_same_steps(components, config, filtered):
    changes = {"num_oversampled_prompts": 1}
    if filtered:
        changes = {"filter_metric": FilterMetric.reward, "filter_range": [0.4, 0.6]}
    together = steps_of(components, config, staleness=0, **changes)
    one_off = steps_of(components, config, staleness=1, **changes)
    assert len(together[0]) > 30
    assert "rollout/reward_mean" in without_ages(together)[0]
    if filtered:
        assert without_ages(one_off) == without_ages(together)
    assert [line["rollout/staleness_max"] for line in together] == [0.0] * 5
    # What was put back comes a step later, and is not lost.
    kept = [line["rollout/num_groups_kept"] for line in one_off]
    assert kept == [3.0] * 5


def test_one_step_off_every_token_is_one_version_old_but_those_of_the_first_step(
    components, config
):
    lines = steps_of(components, config, staleness=1)
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [line["rollout/staleness_mean"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [line["rollout/stale_tokens_fraction"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert without_ages(lines) == without_ages(steps_of(components, config, staleness=0))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=extended) for n in (1, 2))])
def test_no_token_is_older_than_the_bound_whatever_is_slow(components, config, seed):
    components.generator, components.tools.delays = FakeGenerator(delays=seed), seed
    lines = steps_of(components, config, staleness=3)
    ages = [line["rollout/staleness_max"] for line in lines]
    assert max(ages) <= 3
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("staleness", [1, 2])
def test_steps_are_collected_up_to_the_bound_while_an_earlier_one_learns(
    components, config, staleness
):
    sampled = {step: threading.Event() for step in range(1, 6)}

    class Watching(FakeGenerator):
        async def generate(self, request):
            for step, event in sampled.items():
                if f"/train-{step}/" in request.request_id:
                    event.set()
            return await super().generate(request)

    class Waiting(FakePolicy):
        num_updates = 0

        def update(self, batch, kl_weight_BT=None, has_signal_B=None):
            self.num_updates += 1
            ahead = min(self.num_updates + staleness, 5)
            assert sampled[ahead].wait(DEADLINE_S), f"step {ahead} is not sampled meanwhile"
            return super().update(batch, kl_weight_BT, has_signal_B)

    components.generator, components.policy = Watching(), Waiting()
    lines = steps_of(components, config, staleness=staleness)
    ages = [line["rollout/staleness_max"] for line in lines]
    assert ages[:2] == [0.0, 1.0] and max(ages) == staleness


def test_requests_that_weights_cut_in_two_keep_the_version_of_each_token(components, config):
    class Slow(SteppedGenerator):
        async def generate(self, request):
            await asyncio.sleep(0.02)
            return await super().generate(request)

    components.generator = Slow()
    lines = steps_of(components, config, staleness=2)
    assert max(line["rollout/staleness_max"] for line in lines) <= 2
    assert [line["rollout/num_groups_kept"] for line in lines] == [3.0] * 5


@pytest.mark.parametrize("staleness", [1, 3])
def test_requests_in_flight_are_not_waited_for_and_no_token_is_older_than_the_bound(
    components, config, staleness
):
    config = replace(config, weight_sync=WeightSyncConfig(in_flight=True))
    generator = HeldGenerator()

    class Waiting(FakePolicy):
        def update(self, batch, kl_weight_BT=None, has_signal_B=None):
            assert generator.holds_second_step.wait(DEADLINE_S), "step 2 is not sampled meanwhile"
            return super().update(batch, kl_weight_BT, has_signal_B)

    components.generator, components.policy = generator, Waiting()
    lines = steps_of(components, config, staleness=staleness)
    assert components.generator.num_changed > 0
    assert components.generator.aborted == []
    ages = [line["rollout/staleness_max"] for line in lines]
    assert 0 < max(ages) <= staleness
    assert [line["rollout/num_groups_kept"] for line in lines] == [3.0] * 5


class Gated(FakeGenerator):
    """Requests of the third step end when version 3 is served, or never."""

    async def generate(self, request):
        if "/train-3/" in request.request_id:
            self.can_serve = False
            while self.version < 3:
                await asyncio.sleep(0.001)
            self.can_serve = True
        return await super().generate(request)


def test_new_weights_do_not_wait_for_requests_that_no_engine_serves(components, config):
    # A new engine has no weights before the next ones are sent: to wait would be for ever.
    components.generator = Gated()
    lines = steps_of(components, config, staleness=1)
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_bug_in_a_rollout_ends_the_run_at_the_step_that_needs_it(components, config, tmp_path):
    class Broken(FakeGenerator):
        async def generate(self, request):
            if "/train-3/" in request.request_id:
                raise KeyError("a bug")
            return await super().generate(request)

    components.generator = Broken()
    with pytest.raises(KeyError) as caught:
        steps_of(components, config, staleness=1)
    assert caught.value.args == ("a bug",)
    assert [line["step"] for line in metric_lines(tmp_path / "stale-1-0", "rl")] == [1, 2]


KINDS = {
    "adaptive KL": {"warm": False, "ares": False},
    "ARES with its bootstrap": {"warm": False, "ares": True},
}


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("adaptive KL", 0),
        pytest.param("ARES with its bootstrap", 0, marks=pytest.mark.extended),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_a_run_killed_at_any_call_ends_as_if_undisturbed(config, tmp_path, kind, first):
    """One step off a step is sampled by one version, and its trees are kept until it is saved."""
    make = partial(interruptible_config, config, staleness=1, **KINDS[kind])
    moments = Moments()
    expected = outcome(made := make(tmp_path / "whole"), start(made, moments))
    names = [name for name in moments.names if name != "generate"]
    chosen = [(name, names[: at + 1].count(name)) for at, name in enumerate(names)]
    assert len(chosen) > 15
    for name, number in chosen[first::2]:
        made = make(tmp_path / f"killed-{name}-{number}")
        with pytest.raises(Killed):
            start(made, Moments((name, number), die))
        found = outcome(made, start(made, Moments()))
        assert found == expected, f"killed at {name} {number}"


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=extended) for n in (1, 2))])
def test_a_signal_at_any_call_saves_and_the_run_goes_on_with_the_same_prompts(
    config, tmp_path, first
):
    """What a signal cuts short is sampled again, with the newer weights of its boundary."""
    make = partial(interruptible_config, config, staleness=1, **KINDS["adaptive KL"])
    expected = outcome(made := make(tmp_path / "whole"), start(made, moments := Moments()))
    names = [name for name in moments.names if name != "generate"]
    for at in range(first, len(names), 3):
        name = names[at]
        number, signal_handler = names[: at + 1].count(name), SignalHandler()
        made = make(tmp_path / f"stopped-{name}-{number}")
        ask = partial(signal_handler.on_signal, signal.SIGUSR1)
        with pytest.raises(RunInterrupted):
            start(made, Moments((name, number), ask), signal_handler)
        found = outcome(made, start(made, Moments()))
        assert prompts_of(found) == prompts_of(expected), f"stopped at {name} {number}"


def prompts_of(found):
    return [(x["step"], x["actor/prompts"]) for x in found["lines"] if x["stage"] == "rl"]


def test_finished_rollouts_of_a_killed_run_are_used_again(config, tmp_path):
    made = interruptible_config(config, tmp_path, warm=False, ares=False, staleness=1, save_every=1)
    with pytest.raises(Killed):
        start(made, Moments(("updated", 3), die))
    start(made, Moments())
    _, second, _ = metric_lines(tmp_path, "rl")
    assert second["rollout/num_groups_restored"] == 3
    assert second["rollout/staleness_max"] == 1


def test_a_policy_that_is_lost_is_restarted_and_trains_on_the_same_prompts(config, tmp_path):
    def lose():
        raise RankLostError("policy rank 0 died")

    make = partial(interruptible_config, config, warm=False, ares=False, staleness=1)
    expected = outcome(made := make(tmp_path / "whole"), start(made, Moments()))
    moments = [("compute_log_probs", 1), ("update", 2), ("updated", 3), ("sync", 3), ("save", 1)]
    for moment in moments:
        made = make(tmp_path / f"lost-{moment}")
        components = start(made, Moments(moment, lose))
        assert components.policy.num_restarts == 1
        assert outcome(made, components) == expected, f"lost at {moment}"


def test_collect_gives_a_full_group_per_prompt_and_differs_by_step(components, config):
    def texts(step):
        components.prompt_source.at = 0
        with open_rollout_scheduler(components, config, SignalHandler()) as scheduler:
            trees = scheduler.collect(step).trees
        assert [tree.prompt for tree in trees] == components.prompt_source.prompts[:3]
        assert all(len(tree.trajectories) == 4 for tree in trees)
        return [[one.response_text for one in tree.trajectories] for tree in trees]

    assert texts(1) == texts(1) != texts(2)


def test_carried_over_groups_end_with_the_run_and_their_prompts_go_back(components, config):
    async def num_tasks():
        return len(asyncio.all_tasks())

    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    config.rollout.partial_rollout, config.rollout.num_oversampled_prompts = True, 2
    with (
        pytest.raises(ZeroDivisionError),
        open_rollout_scheduler(components, config, SignalHandler()) as scheduler,
    ):
        rollout_batch = scheduler.collect(1)
        assert len(rollout_batch.trees) == 3
        assert rollout_batch.group_counts["num_groups_carried_over"] == 2
        assert len(components.prompt_source.state_dict()["in_flight"]) == 2
        raise ZeroDivisionError
    assert components.run_coroutine(num_tasks()) == 1
    assert all(session.released == 1 for session in components.tools.sessions)
    state = components.prompt_source.state_dict()
    assert not state["in_flight"] and len(state["requeued"]) == 2
