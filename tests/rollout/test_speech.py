"""`rollout.speech`: what the engine is asked, and that nobody asks for more than there is."""

from __future__ import annotations

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.branching import NoBranching
from mega_agentrl.rollout.context import RolloutContext
from mega_agentrl.rollout.speech import Speech, ends_inside
from mega_agentrl.rollout.tape import Tape
from mega_agentrl.types.records import Finish, Restart
from tests.fakes import CharCodec, FakeGenerator, FakeTools, make_prompt, turns


def _speech(write, *, max_model_len=100, restarts=(), **options):
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
    tape = Tape()
    return Speech(context, make_prompt(), "p0", (2, 1), tape, restarts), tape, generator


async def test_parts_of_a_turn_have_names_and_seeds_of_their_own():
    speech, tape, generator = _speech(turns("x" * 50), max_response_tokens=30)
    assert speech.trajectory_id == "p0/s/2.1" and speech.room == 30
    assert await speech.sample(4) is Finish.length and await speech.sample(5) is Finish.length
    tape.close_turn("")
    speech.begin_turn()
    await speech.sample(6)
    names = [request.request_id for request in generator.requests]
    assert names == ["p0/s/2.1/0.0", "p0/s/2.1/0.1", "p0/s/2.1/1.0"]
    assert len({request.seed for request in generator.requests}) == 3
    assert [len(request.token_ids) for request in generator.requests] == [2, 6, 11]
    assert speech.room == 30 - 15


async def test_the_engines_context_counts_the_prompt():
    speech, _, _ = _speech(turns("x" * 500), max_model_len=12)
    assert speech.room == 10


async def test_a_restart_stands_in_front_instead_of_all_before():
    speech, tape, generator = _speech(turns("x" * 50), max_model_len=40)
    await speech.sample(10)
    speech.restart([ord(c) for c in "other?"])
    assert speech.restarts == (Restart(start=10, token_ids=tuple(map(ord, "other?"))),)
    assert speech.room == min(38 - 10, 40 - 6)
    await speech.sample(3)
    await speech.sample(2)
    assert bytes(generator.requests[-1].token_ids) == b"other?xxx"
    assert len(tape) == 15
    speech.restart([0] * 39)
    assert speech.room == 1
    speech.restart([0] * 45)
    assert speech.room < 1


async def test_a_fork_goes_on_behind_its_parents_restart():
    restart = Restart(start=0, token_ids=(65, 63))
    speech, _, generator = _speech(turns("x" * 5), restarts=(restart,))
    await speech.sample(1)
    assert generator.requests[0].token_ids == (65, 63)


async def test_the_rest_of_a_turn_completes_a_cut_tag():
    speech, tape, generator = _speech(turns("ab<search>q</search>never"))
    finish = await speech.sample(14)
    assert await speech.rest_of_turn(finish, 0) is Finish.stop
    assert bytes(tape.token_ids) == b"ab<search>q</search>"
    assert [request.max_tokens for request in generator.requests][1] == 1


async def test_a_turn_that_has_ended_has_no_rest():
    speech, _, generator = _speech(turns("x"))
    assert await speech.rest_of_turn(Finish.eos, 0) is Finish.eos and not generator.requests


def test_beginnings_of_stop_strings():
    assert ends_inside("a</sea", ("</search>",)) and not ends_inside("</search>", ("</search>",))
    assert not ends_inside("a<", ())
