"""The token buffer: sequences of equal length, and prefixes that are copies."""

from __future__ import annotations

from dataclasses import replace

from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.types.records import FinishReason, Generation, Role, ToolOutcome, ToolStatus

OUTCOME = ToolOutcome(tool="python", status=ToolStatus.ok, answer="2", latency_s=0.0)


def _generation(*token_ids, version=3, argmax=None):
    ones = (1.0,) * len(token_ids)
    return Generation(
        request_id="r",
        token_ids=token_ids,
        logps=tuple(-value for value in ones),
        entropies=ones,
        argmax_ids=argmax or token_ids,
        finish_reason=FinishReason.stop,
        stop_string=None,
        version=version,
    )


def _make_buffer():
    buffer = TokenBuffer()
    buffer.append_sampled(_generation(5, 6))
    buffer.append_sampled(_generation(7, version=4))
    buffer.close_turn("call")
    buffer.append_observation([8, 9], "<result>", OUTCOME)
    buffer.append_sampled(_generation(10, version=4))
    return buffer


def test_sampled_tokens_are_trained_on_and_others_masked():
    buffer = _make_buffer()
    assert buffer.open_turn_start == 5
    buffer.close_turn("end")
    assert buffer.token_ids == [5, 6, 7, 8, 9, 10]
    assert buffer.loss_mask == [1, 1, 1, 0, 0, 1]
    assert buffer.logps == [-1, -1, -1, 0, 0, -1] and buffer.entropies == [1, 1, 1, 0, 0, 1]
    assert buffer.versions == [3, 3, 4, 4, 4, 4]
    assert buffer.turn_ids == [0, 0, 0, 1, 1, 2]
    assert [(t.index, t.start, t.stop, t.text) for t in buffer.turns] == [
        (0, 0, 3, "call"),
        (1, 3, 5, "<result>"),
        (2, 5, 6, "end"),
    ]
    assert buffer.turns[1].outcome is OUTCOME and buffer.turns[1].role is Role.tool
    assert buffer.num_assistant_turns == 2 and buffer.open_turn_start == len(buffer) == 6


def test_a_prefix_shares_nothing_with_its_source():
    buffer = _make_buffer()
    prefix = buffer.prefix(5)
    assert prefix.token_ids == [5, 6, 7, 8, 9] and len(prefix.turns) == 2
    prefix.append_sampled(_generation(99))
    prefix.close_turn("fork")
    assert buffer.token_ids[5] == 10 and len(buffer.turns) == 2
    assert {len(getattr(prefix, name)) for name in ("logps", "versions", "turn_ids")} == {6}


def test_a_generation_of_two_versions_keeps_both():
    buffer = TokenBuffer()
    buffer.append_sampled(_generation(1))
    buffer.append_sampled(replace(_generation(5, 6, 7, version=4), versions=(3, 3, 4)))
    buffer.close_turn("call")
    buffer.append_observation([8], "<result>", OUTCOME)
    assert buffer.versions == [3, 3, 3, 4, 4]


def test_argmax_ids_stay_beside_the_sampled_ones():
    buffer = TokenBuffer()
    buffer.append_sampled(_generation(5, 6, argmax=(5, 9)))
    buffer.close_turn("call")
    buffer.append_observation([8], "<result>", OUTCOME)
    fork = buffer.prefix(3)
    buffer.append_sampled(_generation(7))
    fork.append_sampled(_generation(4))
    assert list(buffer.argmax_ids) == [5, 9, -1, 7] and list(fork.argmax_ids) == [5, 9, -1, 4]
