"""One lock-step trajectory by hand: stop reasons, budgets, truncation, failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.branching.lockstep_trajectory import LockstepTrajectory, truncate_buffer
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.types.errors import RankLostError
from mega_agentrl.types.records import (
    FinishReason,
    Generation,
    Role,
    StopReason,
    ToolOutcome,
    ToolStatus,
)
from tests.fakes import EOS, CharCodec, FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END
from tests.rollout.stepped_engine import StuckGenerator

RESULT = "<result>ok:q1</result>"


def _context(write, *, tools=None, max_model_len=1000, **options):
    return make_context(
        RolloutConfig(**({"max_response_tokens": 200, "branching": Branching.released} | options)),
        generator=write if isinstance(write, FakeGenerator) else FakeGenerator(write),
        tools=tools or FakeTools(),
        max_model_len=max_model_len,
    )


async def _live(context, *, max_tokens=200, prompt=None, parent=None, path=(0,)):
    """A trajectory alone, to its end."""
    one = LockstepTrajectory(
        context,
        prompt or make_prompt(),
        "p0",
        prompt_index=0,
        path=path,
        trajectory_index=0,
        parent=parent,
    )
    await one.open_session()
    while one.is_active:
        await one.generate_segment(max_tokens)
        if one.pending_call is not None:
            await one.run_tool()
        one.stop_if_full()
    await one.finalize()
    return one.to_trajectory(None)


async def test_a_call_its_answer_and_the_end():
    tools = FakeTools()
    got = await _live(_context(turns("go" + CALL, END), tools=tools))
    assert got.response_text == "go" + CALL + RESULT + "<answer>1</answer>"
    assert [turn.role for turn in got.turns] == [Role.assistant, Role.tool, Role.assistant]
    assert got.loss_mask == [1] * (2 + len(CALL)) + [0] * len(RESULT) + [1] * len(END)
    assert got.stop_reason is StopReason.eos and got.num_tool_calls == 1
    assert got.tool_rewards == {"python": 1.0} and tools.sessions[0].released == 1


@pytest.mark.parametrize(
    ("texts", "options", "reason", "num_calls"),
    [
        # An empty call counts, and nothing tells the policy.
        (["x<search></search>"], {}, StopReason.stop, 1),
        ([CALL, CALL], {"max_tool_calls": 1}, StopReason.call_limit, 1),
        ([CALL], {"max_tool_calls": 0}, StopReason.call_limit, 0),
        ([CALL, CALL], {"max_turns": 2}, StopReason.turn_limit, 1),
        ([CALL, "x" * 500], {}, StopReason.length, 1),
    ],
)
async def test_each_end_has_its_stop_reason(texts, options, reason, num_calls):
    got = await _live(_context(turns(*texts), **options))
    assert got.stop_reason is reason and got.num_tool_calls == num_calls
    assert len(got.token_ids) <= 200


async def test_a_call_beyond_the_limit_gets_an_eos_that_counts_as_sampled():
    got = await _live(_context(turns(CALL, CALL), max_tool_calls=1))
    assert got.token_ids[-1] == 0 and got.loss_mask[-1] == 1
    assert got.logps[-1] == got.entropies[-1] == 0.0 != got.logps[-2]
    assert got.response_text == CALL + RESULT + CALL


async def test_an_overshooting_trajectory_is_truncated_after_the_tool_has_run():
    tools = FakeTools()
    # The limit of the round is another trajectory's: 200 for a response of 30.
    got = await _live(_context(turns("y" * 20 + CALL, END), tools=tools, max_response_tokens=30))
    assert got.response_text == ("y" * 20 + CALL)[:30] and got.stop_reason is StopReason.length
    assert tools.sessions[0].history == ["q1"] and got.num_tool_calls == 1
    assert [(turn.start, turn.stop, turn.text) for turn in got.turns[1:]] == [(30, 30, "")]
    assert got.turns[1].outcome.answer == "ok:q1"


async def test_an_answer_is_cut_in_the_middle_and_keeps_its_outcome():
    got = await _live(_context(turns(CALL, END), max_response_tokens=len(CALL) + 11))
    assert got.turns[1].text == RESULT[:11] and got.loss_mask[-11:] == [0] * 11
    assert got.turns[1].outcome.answer == "ok:q1" and got.stop_reason is StopReason.length


async def test_a_request_never_reaches_beyond_the_models_length():
    got = await _live(_context(turns("x" * 99), max_model_len=12))
    assert len(got.token_ids) == 10, "the prompt has 2 tokens"
    assert got.stop_reason is StopReason.length


async def test_a_segment_that_the_engine_cut_short_goes_on_in_the_same_turn():
    generator = FakeGenerator(turns("abc" * 4 + EOS))
    got = await _live(_context(generator), max_tokens=5)
    assert got.response_text == "abc" * 4 and len(got.turns) == 1
    assert [request.request_id for request in generator.requests] == [
        f"p0/0/0/0.{part}" for part in range(3)
    ]
    assert len({request.seed for request in generator.requests}) == 3
    assert {request.num_top_logps for request in generator.requests} == {10}


@pytest.mark.parametrize("status", [ToolStatus.ok, ToolStatus.user_error, ToolStatus.infra_error])
@pytest.mark.parametrize("answer", ["", "text"])
async def test_empty_answers_and_failures_read_alike(status, answer):
    tools = FakeTools(answer=lambda text: answer, status=lambda text: status)
    got = await _live(_context(turns(CALL, END), tools=tools))
    heard = answer
    if not answer or status is ToolStatus.infra_error:
        heard = "Tool(search) returned empty output."
    assert got.turns[1].text == f"<result>{heard}</result>"
    assert got.stop_reason is StopReason.eos and got.turns[1].outcome.status is status
    assert tools.sessions[0].history == ["q1"], "and nothing is run again"


async def test_text_behind_the_stop_string_is_not_part_of_the_call():
    class Longer(FakeGenerator):
        """Its last token reaches beyond the stop string."""

        async def generate(self, request):
            got = await super().generate(request)
            if got.stop_string is None:
                return got
            return replace(
                got,
                token_ids=(*got.token_ids, ord("z")),
                logps=(*got.logps, -1.0),
                entropies=(*got.entropies, 1.0),
                argmax_ids=(*got.argmax_ids, ord("z")),
                top_logps=(*got.top_logps, (-1.0,)),
            )

    got = await _live(_context(Longer(turns(CALL, "z" + END))))
    assert got.num_tool_calls == 1 and got.turns[1].outcome.answer == "ok:q1"
    assert got.turns[0].text == CALL + "z", "the ids are kept"


async def test_a_call_is_parsed_from_the_whole_text():
    # The opening tag stands in the prompt, the policy wrote the closing one alone.
    prompt = make_prompt(question="<search>half ")
    got = await _live(_context(turns("and half</search>", END)), prompt=prompt)
    assert got.turns[1].outcome.answer == "ok:half ?and half"


async def test_a_fork_inherits_tokens_calls_and_tools():
    tools = FakeTools()
    context = _context(turns(CALL, "on" + END), tools=tools)
    parent = LockstepTrajectory(
        context, make_prompt(), "p0", prompt_index=0, path=(0,), trajectory_index=0
    )
    await parent.open_session()
    await parent.generate_segment(200)
    await parent.run_tool()
    child = await _live(context, parent=parent, path=(0, 0))
    assert child.fork_len == len(CALL + RESULT) and child.parent_id == parent.trajectory_id
    assert child.token_ids[: child.fork_len] == parent.token_buffer.token_ids
    assert child.num_tool_calls == 1 and tools.sessions[1].history == ["q1"]
    await parent.release()


@pytest.mark.parametrize("step", ["create", "calc_reward", "release"])
async def test_tools_that_fail_outside_of_a_call(step):
    tools = FakeTools(fails_at=step)
    got = await _live(_context(turns(CALL, END), tools=tools))
    assert tools.sessions[0].released == 1
    if step == "release":
        assert got.stop_reason is StopReason.eos
        return
    assert got.failed and got.stop_reason is StopReason.tool_failure
    assert got.turns[-1].outcome.answer == f"{step}: no disk" and got.tool_rewards == {}


async def test_a_dead_engine_fails_the_trajectory_and_keeps_its_tokens():
    generator = FakeGenerator(turns(CALL), breaks=lambda request: len(request.token_ids) > 2)
    got = await _live(_context(generator))
    assert got.stop_reason is StopReason.aborted and got.response_text == CALL + RESULT


async def test_an_endless_recursion_is_no_abort_by_the_engine_and_counts():
    def breaks(request):
        raise RecursionError("maximum recursion depth exceeded")

    got = await _live(_context(FakeGenerator(turns(CALL), breaks=breaks)))
    assert got.stop_reason is StopReason.tool_failure and got.failed


async def test_a_lost_policy_rank_is_raised():
    def breaks(request):
        raise RankLostError("policy rank 1 died")

    with pytest.raises(RankLostError):
        await _live(_context(FakeGenerator(turns(CALL), breaks=breaks)))


async def test_cancellation_aborts_the_request():
    generator = StuckGenerator()
    task = asyncio.create_task(_live(_context(generator)))
    while not (generator.requests or task.done()):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert generator.aborted == [generator.requests[0].request_id]


@pytest.mark.parametrize("length", range(8))
def test_truncation_keeps_turns_and_tokens_aligned(length):
    tape = TokenBuffer()
    text = "abcd"
    tape.append_sampled(
        Generation(
            request_id="r",
            token_ids=tuple(map(ord, text)),
            logps=(-1.0,) * 4,
            entropies=(1.0,) * 4,
            argmax_ids=tuple(map(ord, text)),
            finish_reason=FinishReason.stop,
            stop_string=None,
            version=3,
        )
    )
    tape.close_turn(text)
    outcome = ToolOutcome(tool="search", status=ToolStatus.ok, answer="xyz", latency_s=0.1)
    tape.append_observation(list(map(ord, "xyz")), "xyz", outcome)
    short = truncate_buffer(tape, length, CharCodec())
    assert len(short) == length == short.turns[-1].stop
    assert "".join(turn.text for turn in short.turns) == "abcdxyz"[:length]
    assert [turn.index for turn in short.turns] == [0, 1] and short.turns[1].outcome is outcome
