"""Turns as chat messages, and template drift as text."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass, field

import pytest

from mega_agentrl.config.enums import TemplateCheck
from mega_agentrl.rollout.conversation.messages import build_messages, template_drift, tool_message
from mega_agentrl.types.records import Role, ToolOutcome, ToolStatus, Turn
from tests.fakes import CharCodec, make_prompt

PROMPT = make_prompt(question="Q")
ASKED = {"role": "user", "content": "Q"}


def _turns(*spoken):
    """spoken: author and text; tools and users get an outcome."""
    turns = []
    for author, text in spoken:
        outcome = None
        if author is not Role.assistant:
            outcome = ToolOutcome(tool="t", status=ToolStatus.ok, answer="long", latency_s=0.0)
        index = len(turns)
        turns.append(Turn(index=index, role=author, start=0, stop=0, text=text, outcome=outcome))
    return turns


TURNS = _turns(
    (Role.assistant, "call"),
    (Role.tool, "one"),
    (Role.tool, ""),
    (Role.assistant, "so"),
    (Role.user, "sure?"),
    (Role.assistant, "yes"),
)


def test_with_tags_an_answer_is_part_of_the_assistants_message():
    assert build_messages(PROMPT, TURNS, in_chat=False) == [
        ASKED,
        {"role": "assistant", "content": "calloneso"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]


def test_in_chat_an_answer_is_a_message_and_a_hidden_outcome_is_not():
    got = build_messages(PROMPT, TURNS, in_chat=True)
    assert [message["role"] for message in got] == [
        *("user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert got[2] == {"role": "tool", "name": "t", "content": "one"}
    assert PROMPT.messages == (ASKED,), "the prompt is left alone"


def test_a_name_the_policy_made_up_is_left_out():
    outcome = ToolOutcome(tool="<|x|>", status=ToolStatus.ok, answer="", latency_s=0.0)
    assert tool_message(outcome, "a") == {"role": "tool", "content": "a"}


@dataclass
class PlainChat(CharCodec):
    """Messages as `role:text;`, the assistant's without its last `;` until something follows."""

    trims: bool = False
    turn_end_text: str = field(default=";\n", init=False)

    def apply_chat_template(self, messages, tools=None, *, add_generation_prompt=True):
        said = [(message["role"][0], message["content"]) for message in messages]
        texts = [f"{who}:{text.strip() if self.trims else text}" for who, text in said]
        return self.encode(";\n".join(texts) + ";\n" + "a:" * add_generation_prompt)

    def encode_next_turn(self, messages):
        return self.encode("\n" + self.apply_chat_template(messages))

    def decode_with_special_tokens(self, token_ids):
        return "".join(map(chr, token_ids))


def _drift(said, *, trims=False, mode=TemplateCheck.strict):
    codec = PlainChat(trims)
    turns = _turns((Role.assistant, " x"), (Role.user, "w"), (Role.assistant, "y"))
    prompt = make_prompt(token_ids=tuple(codec.encode("u:Q;\na:")))
    return template_drift(prompt, codec.encode(said), turns, codec, mode, in_chat=True)


@pytest.mark.parametrize("end", ["", ";", ";\n"])
def test_a_partial_end_of_the_last_turn_is_no_difference(end):
    assert _drift(" x;\nu:w;\na:y" + end) == ""


def _quoted(drift):
    """The text before a difference, and both sides of it."""
    return [literal_eval(one) for one in re.findall(r"'(?:\\.|[^'\\])*'", drift)]


def test_a_template_difference_is_shown_with_the_text_before():
    assert _quoted(_drift(" x;\nU:w;\na:y;")) == ["u:Q;\na: x;\n", "u", "U"]
    assert _quoted(_drift(" x;\nu:w!;\na:y;")) == ["u:Q;\na: x;\nu:w", "", "!"]


def test_white_space_is_a_difference_in_strict_mode_only():
    assert _quoted(_drift(" x;\nu:w;\na:y;", trims=True)) == ["u:Q;\na:", "", " "]
    ignoring = TemplateCheck.ignore_strippable
    assert _drift(" x;\nu:w;\na:y;", trims=True, mode=ignoring) == ""
    assert _drift(" x;\nu:v;\na:y;", mode=ignoring) != ""
    assert _drift("anything", mode=TemplateCheck.off) == ""


def test_a_long_difference_is_cut():
    got = _drift("z" * 5000)
    assert len(got) < 400 and "5000" in got
