"""A trajectory as chat messages, and whether its tokens are what the chat template makes of them.

Turns of the assistant are messages as they were sampled, calls included as text; with tags a
tool's answer is part of the assistant's message, else a message of role tool. The tokens of a
conversation grow piece by piece and the policy's own are never tokenized again, so the sum can
differ from the template's rendering of the whole: templates drop old reasoning, add empty
reasoning, trim, or changed since. `template_drift` compares the two as text, special tokens
included. How the policy split its text into tokens is no difference, nor is the end of the last
turn that it did not get to write.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import TemplateCheck
from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.ports import ChatCodec
    from mega_agentrl.types.records import Message, Prompt, ToolOutcome, Turn

SHOWN_CHARS = 60
"""Of each side of a difference, and of what stands before it."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tool_message(outcome: ToolOutcome, text: str) -> Message:
    """A tool's answer; a name that the policy made up is left out."""
    name = {"name": outcome.tool} if _NAME.fullmatch(outcome.tool) else {}
    return {"role": "tool", **name, "content": text}


def user_message(text: str) -> Message:
    """What the simulated user says."""
    return {"role": "user", "content": text}


def messages_of(prompt: Prompt, turns: Sequence[Turn], *, in_chat: bool) -> list[Message]:
    """The prompt's messages and everything said since; notes without text are left out.

    in_chat: tools answer in messages of their own (`ports.ToolProvider.answers_in_chat`).
    """
    messages = [dict(message) for message in prompt.messages]
    speaking = False
    for turn in turns:
        if turn.outcome is not None and not turn.text:
            continue
        if turn.author is Author.user:
            messages.append(user_message(turn.text))
            speaking = False
        elif turn.author is Author.tool and in_chat:
            assert turn.outcome is not None
            messages.append(tool_message(turn.outcome, turn.text))
            speaking = False
        elif speaking:
            messages[-1]["content"] += turn.text
        else:
            messages.append({"role": "assistant", "content": turn.text})
            speaking = True
    return messages


def template_drift(
    prompt: Prompt,
    token_ids: Sequence[int],
    turns: Sequence[Turn],
    codec: ChatCodec,
    mode: TemplateCheck,
    *,
    in_chat: bool,
) -> str:
    """The first difference with what stands before it; empty where there is none.

    token_ids: the response. Under `ignore_strippable` white space does not count.
    """
    if mode is TemplateCheck.off:
        return ""
    messages = messages_of(prompt, turns, in_chat=in_chat)
    ended = messages[-1]["role"] == "assistant"
    whole = codec.apply_chat(messages, prompt.tool_schemas or None, generate=not ended)
    expected = codec.raw_text(whole)
    got = codec.raw_text((*prompt.token_ids, *token_ids))
    end = codec.end_text if ended else ""
    if mode is TemplateCheck.ignore_strippable:
        expected, got, end = ("".join(text.split()) for text in (expected, got, end))
    expected = _as_far(expected, got, end)
    return "" if expected == got else _shown(expected, got)


def _as_far(expected: str, got: str, end: str) -> str:
    """The expected text with as much of `end`, which it ends in, as `got` has."""
    if not expected.endswith(end):
        return expected
    size = next(size for size in range(len(end), -1, -1) if got.endswith(end[:size]))
    return expected[: len(expected) - len(end) + size]


def _shown(expected: str, got: str) -> str:
    start = _num_common(expected, got)
    stop = -_num_common(expected[start:][::-1], got[start:][::-1]) or None
    before = expected[max(0, start - SHOWN_CHARS) : start]
    return (
        f"after {before!r} the template has {_brief(expected[start:stop])}, "
        f"the trajectory {_brief(got[start:stop])}"
    )


def _num_common(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _brief(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return repr(text)
    return f"{text[:SHOWN_CHARS]!r}... ({len(text)} characters)"
