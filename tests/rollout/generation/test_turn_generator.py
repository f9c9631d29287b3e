"""Engine requests of a trajectory stay within its budgets."""

from __future__ import annotations

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.branching.policy import NoBranching
from mega_agentrl.rollout.context import RolloutContext
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.rollout.generation.turn_generator import TurnGenerator, ends_with_partial_stop
from mega_agentrl.types.records import ContextReset, FinishReason
from tests.fakes import CharCodec, FakeGenerator, FakeTools, make_prompt, turns


def _make_generator(write, *, max_model_len=100, context_resets=(), **options):
    generator = FakeGenerator(write)
    context = RolloutContext(
        generator=generator,
        tools=FakeTools(),
        codec=CharCodec(),
        policy=NoBranching(),
        config=RolloutConfig(**options),
        temperature=1.0,
        max_model_len=max_model_len,
        seed=1,
        step="s",
    )
    buffer = TokenBuffer()
    return (
        TurnGenerator(context, make_prompt(), "p0", (2, 1), buffer, context_resets),
        buffer,
        generator,
    )


async def test_parts_of_a_turn_have_names_and_seeds_of_their_own():
    turn_generator, buffer, generator = _make_generator(turns("x" * 50), max_response_tokens=30)
    assert turn_generator.trajectory_id == "p0/s/2.1" and turn_generator.num_tokens_left == 30
    assert (
        await turn_generator.sample(4) is FinishReason.length
        and await turn_generator.sample(5) is FinishReason.length
    )
    buffer.close_turn("")
    turn_generator.start_turn()
    await turn_generator.sample(6)
    names = [request.request_id for request in generator.requests]
    assert names == ["p0/s/2.1/0.0", "p0/s/2.1/0.1", "p0/s/2.1/1.0"]
    assert len({request.seed for request in generator.requests}) == 3
    assert [len(request.token_ids) for request in generator.requests] == [2, 6, 11]
    assert turn_generator.num_tokens_left == 30 - 15


async def test_the_engines_context_counts_the_prompt():
    turn_generator, _, _ = _make_generator(turns("x" * 500), max_model_len=12)
    assert turn_generator.num_tokens_left == 10


async def test_a_context_reset_replaces_all_tokens_before():
    turn_generator, buffer, generator = _make_generator(turns("x" * 50), max_model_len=40)
    await turn_generator.sample(10)
    turn_generator.replace_context([ord(c) for c in "other?"])
    assert turn_generator.context_resets == (
        ContextReset(start=10, token_ids=tuple(map(ord, "other?"))),
    )
    assert turn_generator.num_tokens_left == min(38 - 10, 40 - 6)
    await turn_generator.sample(3)
    await turn_generator.sample(2)
    assert bytes(generator.requests[-1].token_ids) == b"other?xxx"
    assert len(buffer) == 15
    turn_generator.replace_context([0] * 39)
    assert turn_generator.num_tokens_left == 1
    turn_generator.replace_context([0] * 45)
    assert turn_generator.num_tokens_left < 1


async def test_a_fork_continues_behind_its_parents_context_reset():
    reset = ContextReset(start=0, token_ids=(65, 63))
    turn_generator, _, generator = _make_generator(turns("x" * 5), context_resets=(reset,))
    await turn_generator.sample(1)
    assert generator.requests[0].token_ids == (65, 63)


async def test_the_rest_of_a_turn_completes_a_split_tag():
    turn_generator, buffer, generator = _make_generator(turns("ab<search>q</search>never"))
    finish = await turn_generator.sample(14)
    assert await turn_generator.finish_turn(finish, 0) is FinishReason.stop
    assert bytes(buffer.token_ids) == b"ab<search>q</search>"
    assert [request.max_tokens for request in generator.requests][1] == 1


async def test_a_turn_that_has_ended_has_no_rest():
    turn_generator, _, generator = _make_generator(turns("x"))
    assert (
        await turn_generator.finish_turn(FinishReason.eos, 0) is FinishReason.eos
        and not generator.requests
    )


def test_beginnings_of_stop_strings():
    assert ends_with_partial_stop("a</sea", ("</search>",)) and not ends_with_partial_stop(
        "</search>", ("</search>",)
    )
    assert not ends_with_partial_stop("a<", ())
