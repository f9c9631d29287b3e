"""One trajectory at a time by hand: stop reasons, budgets, probes, failures."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching.policy import ArpoBranching, NoBranching, PathBudget
from mega_agentrl.rollout.trajectory import TrajectoryRunner, TrajectoryState
from mega_agentrl.types.errors import RankLostError
from mega_agentrl.types.records import Role, StopReason, ToolStatus
from tests.fakes import EOS, FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END, entropy_levels
from tests.rollout.stepped_engine import StuckGenerator

RESULT = "<result>ok:q1</result>"
RISE = entropy_levels(1.0, 2.0)


def _run(write, *, tools=None, policy=None, max_model_len=1000, slots=0, on_fork=None, **options):
    generator = write if isinstance(write, FakeGenerator) else FakeGenerator(write)
    context = make_context(
        RolloutConfig(**({"max_response_tokens": 200} | options)),
        generator=generator,
        tools=tools or FakeTools(),
        policy=policy or NoBranching(),
        max_model_len=max_model_len,
    )
    forks = []
    return TrajectoryRunner(
        context,
        make_prompt(),
        "p0",
        (0,),
        budget=PathBudget(slots),
        on_fork=on_fork or forks.append,
    )


async def test_a_call_its_answer_and_the_end():
    tools = FakeTools()
    run = _run(turns("go" + CALL, END), tools=tools)
    got = await run.run()
    assert got.response_text == "go" + CALL + RESULT + "<answer>1</answer>"
    assert [turn.role for turn in got.turns] == [Role.assistant, Role.tool, Role.assistant]
    expected = [1] * (2 + len(CALL)) + [0] * len(RESULT) + [1] * len(END)
    assert got.loss_mask == expected
    assert [entropy == 0 for entropy in got.entropies] == [mask == 0 for mask in expected]
    assert got.stop_reason is StopReason.eos and got.num_tool_calls == 1 and not got.failed
    assert got.tool_rewards == {"python": 1.0} and got.turns[1].outcome.tool == "search"
    assert run.state is TrajectoryState.completed and tools.sessions[0].released == 1
    assert got.token_ids[-1] == 0, "the end of the turn is trained on"


@pytest.mark.parametrize(
    ("texts", "options", "reason", "num_calls", "num_tokens"),
    [
        (["x<search></search>"], {}, StopReason.stop, 0, 18),
        ([CALL, CALL], {"max_tool_calls": 1}, StopReason.call_limit, 1, 60),
        ([CALL], {"max_tool_calls": 0}, StopReason.call_limit, 0, 19),
        ([CALL, CALL], {"max_turns": 2}, StopReason.turn_limit, 1, 60),
        (["x" * 50], {"max_response_tokens": 20}, StopReason.length, 0, 20),
        ([CALL, "x" * 500], {}, StopReason.length, 1, 200),
        # The prompt has 2 tokens.
        (["x" * 99], {"max_model_len": 12}, StopReason.length, 0, 10),
    ],
)
async def test_stop_reasons_and_exact_budgets(texts, options, reason, num_calls, num_tokens):
    got = await _run(turns(*texts), **options).run()
    assert got.stop_reason is reason and got.num_tool_calls == num_calls
    assert len(got.token_ids) == num_tokens
    assert got.turns[-1].role is Role.assistant, "no tool ran whose answer nobody reads"


async def test_an_answer_that_does_not_fit_is_cut_with_a_note():
    tools = FakeTools(answer=lambda text: "z" * 500)
    got = await _run(turns(CALL, "y" * 99), tools=tools, max_response_tokens=119).run()
    answer = got.turns[1]
    assert answer.text.endswith("z... [cut]</result>")
    assert 40 < answer.stop - answer.start <= 50, "at most half of the 100 that were left"
    assert got.stop_reason is StopReason.length and len(got.token_ids) == 119
    assert got.turns[1].outcome.answer == "z" * 500


async def test_an_answer_that_fits_to_the_last_token_but_one_is_not_cut():
    size = len(CALL) + len(RESULT)
    got = await _run(turns(CALL, "yyy"), max_response_tokens=size + 1).run()
    assert got.response_text == CALL + RESULT + "y"


async def test_no_room_for_any_answer_ends_by_length():
    got = await _run(turns(CALL, "y"), max_response_tokens=len(CALL) + 10).run()
    assert got.stop_reason is StopReason.length and got.response_text == CALL
    assert got.turns[1].outcome.answer == "ok:q1" and got.turns[1].start == got.turns[1].stop


async def test_an_infra_error_of_a_tool_fails_the_trajectory():
    tools = FakeTools(status=lambda text: ToolStatus.infra_error)
    run = _run(turns(CALL), tools=tools)
    got = await run.run()
    assert got.stop_reason is StopReason.tool_failure and got.failed
    assert run.state is TrajectoryState.failed and tools.sessions[0].released == 1
    assert got.tool_rewards == {} and got.num_tool_calls == 1


@pytest.mark.parametrize("step", ["create", "calc_reward"])
async def test_a_tool_error_outside_of_a_call_fails_the_trajectory_and_is_its_last_turn(step):
    tools = FakeTools(fails_at=step)
    got = await _run(turns(CALL, END), tools=tools).run()
    assert got.stop_reason is StopReason.tool_failure and got.failed
    assert got.turns[-1].outcome.answer == f"{step}: no disk"
    assert got.turns[-1].start == got.turns[-1].stop == len(got.token_ids)
    assert got.response_text == ("" if step == "create" else f"{CALL}{RESULT}{END[:-1]}")
    assert got.tool_rewards == {} and tools.sessions[0].released == 1


async def test_an_error_in_release_does_not_fail_the_trajectory():
    tools = FakeTools(fails_at="release")
    got = await _run(turns(CALL, END), tools=tools).run()
    assert not got.failed and tools.sessions[0].released == 1


async def test_an_error_in_forking_tools_is_the_last_turn_of_the_fork():
    run, _, forks = _probing("thinking" + END, slots=1, tools=FakeTools(fails_at="fork"))
    assert not (await run.run()).failed
    child = await forks[0].run()
    assert child.stop_reason is StopReason.tool_failure
    assert child.turns[-1].outcome.answer == "fork: no disk"
    assert len(child.token_ids) == child.fork_len


async def test_a_dead_engine_fails_the_trajectory_and_keeps_its_tokens():
    tools = FakeTools()
    generator = FakeGenerator(turns(CALL), breaks=lambda request: len(request.token_ids) > 2)
    got = await _run(generator, tools=tools).run()
    assert got.stop_reason is StopReason.aborted and got.failed
    assert got.response_text == CALL + RESULT and tools.sessions[0].released == 1


async def test_an_endless_recursion_is_no_abort_by_the_engine_and_counts():
    def breaks(request):
        raise RecursionError("maximum recursion depth exceeded")

    got = await _run(FakeGenerator(turns(CALL), breaks=breaks)).run()
    assert got.stop_reason is StopReason.tool_failure and got.failed


async def test_a_lost_policy_rank_is_raised():
    def breaks(request):
        raise RankLostError("policy rank 1 died")

    tools = FakeTools()
    with pytest.raises(RankLostError):
        await _run(FakeGenerator(turns(CALL), breaks=breaks), tools=tools).run()
    assert tools.sessions[0].released == 1


async def test_a_bug_passes_through_and_still_releases_the_tools():
    tools = FakeTools(answer=lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await _run(turns(CALL), tools=tools).run()
    assert tools.sessions[0].released == 1


async def test_cancellation_aborts_the_request_and_releases_the_tools():
    generator, tools = StuckGenerator(), FakeTools()
    task = asyncio.create_task(_run(generator, tools=tools).run())
    while not (generator.requests or task.done()):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert generator.aborted == [generator.requests[0].request_id]
    assert tools.sessions[0].released == 1


def _probing(rest, *, entropy=RISE, slots=3, k=8, **options):
    generator = FakeGenerator(turns("calmcalm" + CALL, rest), entropy=entropy)
    policy = ArpoBranching(BranchConfig(num_probe_tokens=k))
    forks = []
    run = _run(generator, policy=policy, slots=slots, on_fork=forks.append, **options)
    return run, generator, forks


async def test_a_rise_in_entropy_forks_behind_the_answer_and_the_probe_stays_here():
    run, generator, forks = _probing("thinking hard" + END)
    got = await run.run()
    fork_len = len("calmcalm" + CALL + RESULT)
    assert got.baseline_entropy == 1.0 and got.stop_reason is StopReason.eos
    assert [request.max_tokens for request in generator.requests] == [200, 8, 192 - fork_len]
    assert len({request.seed for request in generator.requests}) == 3
    assert got.response_text.endswith("</result>thinking hard<answer>1</answer>")
    assert [fork.path for fork in forks] == [(0, 0)]
    child = await forks[0].run()
    assert child.parent_id == got.trajectory_id and child.fork_len == fork_len
    assert child.token_ids[:fork_len] == got.token_ids[:fork_len]
    assert child.baseline_entropy == 1.0 and child.num_tool_calls == 1
    assert len(generator.requests) == 4, "the fork does not probe at the same answer again"
    assert child.path == (0, 0) and child.turns[:2] == got.turns[:2]


async def test_no_rise_no_fork_and_without_slots_no_probe():
    run, generator, forks = _probing("thinking hard" + END, entropy=lambda *_: 1.0)
    await run.run()
    assert forks == [] and len(generator.requests) == 3
    run, generator, forks = _probing("thinking hard" + END, slots=0)
    await run.run()
    assert forks == [] and len(generator.requests) == 2


@pytest.mark.parametrize(("rest", "num_forks"), [("abcd" + EOS, 1), ("abc" + EOS, 0)])
async def test_a_turn_that_ends_within_the_probe(rest, num_forks):
    run, generator, forks = _probing(rest)
    await run.run()
    assert len(forks) == num_forks and len(generator.requests) == 2
    for fork in forks:
        await fork.release()


@pytest.mark.parametrize("k", range(5, 24))
async def test_a_closing_tag_that_the_probe_cuts_in_two_still_stops(k):
    run, _, _ = _probing("ab" + CALL + "never read", entropy=lambda *_: 1.0, k=k, max_tool_calls=1)
    got = await run.run()
    assert got.response_text == "calmcalm" + CALL + RESULT + "ab" + CALL
    assert got.stop_reason is StopReason.call_limit


async def test_the_timeout_ends_a_trajectory_in_any_state():
    class SlowTools(FakeTools):
        async def wait(self):
            await asyncio.sleep(60)

    generator, tools = StuckGenerator(), FakeTools()
    run = _run(generator, tools=tools, trajectory_timeout_s=0.05)
    got = await asyncio.wait_for(run.run(), 300)
    assert got.stop_reason is StopReason.trajectory_timeout and got.failed
    assert run.state is TrajectoryState.failed
    assert generator.aborted == [generator.requests[0].request_id]
    assert tools.sessions[0].released == 1
    tools = SlowTools()
    got = await asyncio.wait_for(
        _run(turns("a" + CALL), tools=tools, trajectory_timeout_s=0.05).run(), 60
    )
    assert got.stop_reason is StopReason.time_limit and not got.failed
    assert got.response_text == "a" + CALL
    assert got.num_tool_calls == 1 and tools.sessions[0].released == 1


async def test_a_fork_inherits_the_deadline_of_its_parent():
    run, generator, forks = _probing("thinking hard" + END, trajectory_timeout_s=0.2)
    assert not (await run.run()).failed
    generator.delays = 1  # a fork that never waits is never interrupted
    await asyncio.sleep(0.25)
    got = await forks[0].run()
    assert got.stop_reason is StopReason.trajectory_timeout and got.failed
