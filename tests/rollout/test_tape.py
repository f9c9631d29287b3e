"""`rollout.tape`: sequences keep one length, and a prefix is a copy."""

from __future__ import annotations

from dataclasses import replace

from mega_agentrl.rollout.tape import Tape
from mega_agentrl.types.records import Author, Finish, Generation, ToolOutcome, ToolStatus

OUTCOME = ToolOutcome(tool="python", status=ToolStatus.ok, answer="2", latency_s=0.0)


def _said(*token_ids, version=3, likeliest=None):
    ones = (1.0,) * len(token_ids)
    return Generation(
        request_id="r",
        token_ids=token_ids,
        logps=tuple(-value for value in ones),
        entropies=ones,
        argmax_ids=likeliest or token_ids,
        finish=Finish.stop,
        stop_string=None,
        version=version,
    )


def _tape():
    tape = Tape()
    tape.add_sampled(_said(5, 6))
    tape.add_sampled(_said(7, version=4))
    tape.close_turn("call")
    tape.add_tool([8, 9], "<result>", OUTCOME)
    tape.add_sampled(_said(10, version=4))
    return tape


def test_turns_and_marks_by_hand():
    tape = _tape()
    assert tape.open_from == 5
    tape.close_turn("end")
    assert tape.token_ids == [5, 6, 7, 8, 9, 10]
    assert tape.loss_mask == [1, 1, 1, 0, 0, 1]
    assert tape.logps == [-1, -1, -1, 0, 0, -1] and tape.entropies == [1, 1, 1, 0, 0, 1]
    assert tape.versions == [3, 3, 4, 4, 4, 4]
    assert tape.turn_ids == [0, 0, 0, 1, 1, 2]
    assert [(t.index, t.start, t.stop, t.text) for t in tape.turns] == [
        (0, 0, 3, "call"),
        (1, 3, 5, "<result>"),
        (2, 5, 6, "end"),
    ]
    assert tape.turns[1].outcome is OUTCOME and tape.turns[1].author is Author.tool
    assert tape.num_said == 2 and tape.open_from == len(tape) == 6


def test_a_prefix_shares_nothing_with_its_source():
    tape = _tape()
    prefix = tape.prefix(5)
    assert prefix.token_ids == [5, 6, 7, 8, 9] and len(prefix.turns) == 2
    prefix.add_sampled(_said(99))
    prefix.close_turn("fork")
    assert tape.token_ids[5] == 10 and len(tape.turns) == 2
    assert {len(getattr(prefix, name)) for name in ("logps", "versions", "turn_ids")} == {6}


def test_a_user_speaks_like_a_tool():
    tape = _tape()
    tape.close_turn("said")
    tape.add_tool([11], "why?", OUTCOME, Author.user)
    assert tape.turns[-1].author is Author.user and tape.loss_mask[-1] == 0
    assert tape.num_said == 2


def test_a_note_without_tokens_may_come_first():
    tape = Tape()
    tape.add_tool((), "", OUTCOME)
    assert len(tape) == 0 and [(t.start, t.stop) for t in tape.turns] == [(0, 0)]
    assert tape.prefix(0).turns == tape.turns


def test_a_generation_of_two_versions_keeps_both():
    tape = Tape()
    tape.add_sampled(_said(1))
    tape.add_sampled(replace(_said(5, 6, 7, version=4), versions=(3, 3, 4)))
    tape.close_turn("call")
    tape.add_tool([8], "<result>", OUTCOME)
    assert tape.versions == [3, 3, 3, 4, 4]


def test_the_likeliest_tokens_stay_beside_the_sampled_ones():
    tape = Tape()
    tape.add_sampled(_said(5, 6, likeliest=(5, 9)))
    tape.close_turn("call")
    tape.add_tool([8], "<result>", OUTCOME)
    fork = tape.prefix(3)
    tape.add_sampled(_said(7))
    fork.add_sampled(_said(4))
    assert list(tape.argmax_ids) == [5, 9, -1, 7] and list(fork.argmax_ids) == [5, 9, -1, 4]
