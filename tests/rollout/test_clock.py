"""Time limits: what the policy takes long for is scored, what the run takes long for is masked.

All times are virtual.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.branching.policy import NoBranching, PathBudget
from mega_agentrl.rollout.clock import SamplingSpeed, TrajectoryClock
from mega_agentrl.rollout.generation.interruptible import truncate_generation
from mega_agentrl.rollout.trajectory import TrajectoryRunner
from mega_agentrl.types.records import FinishReason, StopReason
from tests.fakes import FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END
from tests.rollout.virtual_time import run_virtually

RESULT = "<result>ok:q1</result>"
LIMIT_S = 100.0


@dataclass
class PacedGenerator(FakeGenerator):
    """An engine that takes as long for each token; `abort` returns those it has.

    queue_s(number): how long the request of this number, from 1, waits before its first token.
    answers_abort: whether it does.
    """

    seconds_per_token: float = 0.0
    queue_s: object = lambda number: 0.0
    answers_abort: bool = True
    events: dict = field(default_factory=dict)

    async def generate(self, request):
        whole = await super().generate(request)
        start_s = asyncio.get_running_loop().time() + self.queue_s(len(self.requests))
        end_s = start_s + self.seconds_per_token * len(whole.token_ids)
        aborted = self.events[request.request_id] = asyncio.Event()
        try:
            async with asyncio.timeout_at(end_s):
                await aborted.wait()
        except TimeoutError:
            return whole
        written_s = max(0.0, asyncio.get_running_loop().time() - start_s)
        cut = truncate_generation(whole, max(1, int(written_s / self.seconds_per_token)))
        if not written_s:
            cut = replace(cut, token_ids=(), logps=(), entropies=(), argmax_ids=(), top_logps=())
        return replace(cut, finish_reason=FinishReason.aborted, stop_string=None)

    async def abort(self, request_id):
        await super().abort(request_id)
        if self.answers_abort and request_id in self.events:
            self.events[request_id].set()


@dataclass
class TimedTools(FakeTools):
    """Tools whose calls wait and then run so long."""

    wait_s: float = 0.0
    run_s: float = 0.0
    create_s: float = 0.0

    def open_session(self):
        session, tools = super().open_session(), self
        execute, create = session.execute, session.create

        async def timed_execute(tool, arguments):
            session.on_wait(True)
            await asyncio.sleep(tools.wait_s)
            session.on_wait(False)
            await asyncio.sleep(tools.run_s)
            return await execute(tool, arguments)

        async def timed_create(kwargs):
            await asyncio.sleep(tools.create_s)
            await create(kwargs)

        session.execute, session.create = timed_execute, timed_create
        return session


def sample(write, *, tools=None, engine=None, **options):
    """One trajectory, and how long it took."""

    async def run():
        generator = replace(engine or PacedGenerator(), write=write)
        config = {"max_response_tokens": 400, "trajectory_timeout_s": LIMIT_S, "max_tool_calls": 20}
        context = make_context(
            RolloutConfig(**(config | {"max_turns": 20} | options)),
            generator=generator,
            tools=tools or FakeTools(),
            policy=NoBranching(),
            max_model_len=1000,
        )
        runner = TrajectoryRunner(
            context, make_prompt(), "p0", (0,), budget=PathBudget(0), on_fork=lambda fork: None
        )
        return await runner.run(), asyncio.get_running_loop().time()

    return run_virtually(run())


CALLS = turns(*[CALL] * 9, END)


def test_calls_that_take_as_long_as_they_may_end_a_trajectory_that_is_scored():
    tools = TimedTools(run_s=40)
    got, seconds = sample(CALLS, tools=tools)
    assert got.stop_reason is StopReason.time_limit and not got.failed
    assert seconds == pytest.approx(LIMIT_S, abs=0.1)
    assert got.response_text == (CALL + RESULT) * 2 + CALL
    assert got.tool_rewards == {"python": 2.0}, "two calls have run, and their reward counts"
    assert tools.sessions[0].released == 1


def test_calls_cannot_fill_up_the_time_that_a_slow_machine_has_left():
    tools = TimedTools(create_s=90, run_s=40)
    got, seconds = sample(CALLS, tools=tools)
    assert got.stop_reason is StopReason.time_limit, "not masked after 10 s of its own"
    assert seconds == pytest.approx(90 + LIMIT_S, abs=0.1)


def test_an_attempt_on_a_slow_machine_has_all_of_its_own_time():
    tools = TimedTools(create_s=90, run_s=40)
    got, seconds = sample(turns(CALL, CALL, END), tools=tools)
    assert got.stop_reason is StopReason.eos and seconds == pytest.approx(170, abs=0.1)


@pytest.mark.parametrize(
    "tools",
    [TimedTools(create_s=150), TimedTools(wait_s=30), TimedTools(wait_s=45, run_s=40)],
    ids=["created late", "no free slot", "no free slot for long, and calls"],
)
def test_tools_that_keep_a_trajectory_waiting_mask_it(tools):
    got, _ = sample(CALLS, tools=tools)
    assert got.stop_reason is StopReason.trajectory_timeout and got.failed


@pytest.mark.parametrize("answers_abort", [True, False], ids=["answers", "hangs"])
def test_an_engine_that_keeps_a_trajectory_waiting_masks_it(answers_abort):
    stall = PacedGenerator(
        seconds_per_token=0.1,
        queue_s=lambda number: 1000.0 if number == 3 else 0.0,
        answers_abort=answers_abort,
    )
    got, seconds = sample(CALLS, tools=TimedTools(run_s=30), engine=stall)
    assert got.stop_reason is StopReason.trajectory_timeout and got.failed
    assert got.response_text == (CALL + RESULT) * 2
    assert seconds == pytest.approx(2 * LIMIT_S, abs=3)


def test_a_policy_that_writes_on_and_on_reaches_a_limit_and_what_it_wrote_is_trained():
    engine = PacedGenerator(seconds_per_token=1.0)
    got, _ = sample(turns(CALL, "x" * 400), engine=engine)
    assert got.stop_reason is StopReason.time_limit and not got.failed
    written = got.response_text.removeprefix(CALL + RESULT)
    assert 150 < len(written) <= 200 and set(written) == {"x"}
    assert sum(got.loss_mask) == len(CALL) + len(written)
    assert got.turns[-1].stop == len(got.token_ids)


def test_many_short_turns_after_a_long_context_are_the_policys_time():
    engine = PacedGenerator(queue_s=lambda number: 12.0)
    got, _ = sample(turns(*[CALL] * 15, END), engine=engine)
    assert got.stop_reason is StopReason.time_limit and not got.failed
    assert got.num_tool_calls == 9


def test_an_engine_as_fast_as_usual_takes_the_policys_time_and_a_stalled_one_its_own():
    async def run(seconds, num_tokens):
        speed = SamplingSpeed()
        for usual in (0.1, 0.1, 8.0):
            speed.add(10 * usual, 10)
        clock = TrajectoryClock(0, speed)
        clock.start(lambda: None)
        clock.begin_sampling()
        await asyncio.sleep(seconds)
        clock.end_sampling(num_tokens)
        clock.stop()
        return clock.policy_s, clock.run_s

    assert run_virtually(run(5, 50)) == pytest.approx((5, 0), abs=1e-4)
    assert run_virtually(run(5, 20)) == pytest.approx((2, 3), abs=1e-4)
    # A short request takes its turn and its context as well.
    assert run_virtually(run(5, 1)) == pytest.approx((1, 4), abs=1e-4)
    assert run_virtually(run(5, 0)) == pytest.approx((0, 5), abs=1e-4)


def test_requests_of_an_agent_that_overlap_are_counted_once_and_between_them_it_is_the_policys():
    async def run():
        speed = SamplingSpeed()
        speed.add(2, 20)
        clock = TrajectoryClock(0, speed, is_agent=True)
        clock.start(lambda: None)
        await asyncio.sleep(3)  # it starts
        clock.begin_sampling()
        await asyncio.sleep(4)
        clock.begin_sampling()
        await asyncio.sleep(4)
        clock.end_sampling(30)
        clock.end_sampling(20)
        await asyncio.sleep(7)
        clock.note_waiting(True)
        await asyncio.sleep(2)
        clock.note_waiting(False)
        clock.stop()
        return clock.policy_s, clock.run_s

    assert run_virtually(run()) == pytest.approx((5 + 7, 3 + 3 + 2), abs=1e-4)


def test_a_fork_goes_on_with_both_clocks_and_waits_on_that_of_the_run():
    async def run():
        clock = TrajectoryClock(10)
        clock.start(lambda: None)
        with clock.policys_turn():
            await asyncio.sleep(6)
        await asyncio.sleep(2)
        child, over = clock.fork(), asyncio.Event()
        clock.stop()
        await asyncio.sleep(1)
        child.start(over.set)
        with child.policys_turn():
            await over.wait()
        child.stop()
        return child.policy_s, child.run_s

    assert run_virtually(run()) == pytest.approx((10, 3), abs=1e-4)


def test_time_is_over_once_and_not_without_a_limit():
    async def run(limit_s):
        calls = []
        clock = TrajectoryClock(limit_s)
        clock.start(lambda: calls.append(asyncio.get_running_loop().time()))
        with clock.policys_turn():
            await asyncio.sleep(30)
        clock.stop()
        return calls, clock.is_over

    calls, is_over = run_virtually(run(10))
    assert calls == pytest.approx([10], abs=1e-4) and is_over
    assert run_virtually(run(0)) == ([], False)
