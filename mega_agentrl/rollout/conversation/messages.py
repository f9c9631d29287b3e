"""Trajectories as chat messages, and the check that their tokens match the chat template.

Assistant turns become messages as they were sampled, calls included as text. With the tag protocol
a tool answer is part of the assistant's message, otherwise a message of role `tool`.

The tokens of a conversation are appended piece by piece, and sampled tokens are never tokenized
again, so the result can differ from the template's rendering of the whole conversation: templates
drop old reasoning, add empty reasoning, trim, or were changed. `template_drift` compares both as
text, special tokens included. How the policy split its text into tokens does not matter, nor does
a missing end of the last turn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import TemplateCheck
from mega_agentrl.types.records import Role
from mega_agentrl.vision.placeholders import content_parts, split_at_labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.images import ImageInput
    from mega_agentrl.types.protocols import ChatCodec
    from mega_agentrl.types.records import Message, Prompt, ToolOutcome, Turn

MAX_SHOWN_CHARS = 60
"""Maximum characters shown of each side of a difference and of the text before it."""

TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Well-formed tool names; the policy may make up others."""


def tool_message(outcome: ToolOutcome, content: Any) -> Message:
    """Return the message of a tool answer, a text or parts; a malformed name is left out."""
    name = {"name": outcome.tool} if TOOL_NAME_PATTERN.fullmatch(outcome.tool) else {}
    return {"role": "tool", **name, "content": content}


def user_message(text: str) -> Message:
    """Return a message of the simulated user."""
    return {"role": "user", "content": text}


def build_messages(
    prompt: Prompt, turns: Sequence[Turn], images: Sequence[ImageInput] = (), *, in_chat: bool
) -> list[Message]:
    """Return the conversation so far; hidden outcomes, which have no text, are left out.

    Args:
        prompt: The prompt, whose messages come first.
        turns: The turns of the response.
        images: The images of the response, in order; their labels in texts become parts.
        in_chat: Whether tools answer in chat messages (`ToolProvider.uses_tool_messages`).
    """
    messages = [dict(message) for message in prompt.messages]
    remaining = iter(images)
    continues_assistant = False
    for turn in turns:
        if turn.outcome is not None and not turn.text:
            continue
        if turn.role is Role.user:
            messages.append(user_message(turn.text))
            continues_assistant = False
        elif turn.role is Role.tool and in_chat:
            assert turn.outcome is not None
            messages.append(tool_message(turn.outcome, _turn_content(turn, remaining)))
            continues_assistant = False
        elif continues_assistant:
            content = _turn_content(turn, remaining)
            messages[-1]["content"] = _join_contents(messages[-1]["content"], content)
        else:
            messages.append({"role": "assistant", "content": turn.text})
            continues_assistant = True
    return messages


def _turn_content(turn: Turn, images: Iterator[ImageInput]) -> Any:
    """Return the text of a turn, or its parts if it has images, which are taken from `images`."""
    if turn.outcome is None or not turn.outcome.images:
        return turn.text
    return split_at_labels(turn.text, [next(images) for _ in turn.outcome.images])


def _join_contents(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*content_parts(first), *content_parts(second)]


def template_drift(
    prompt: Prompt,
    token_ids: Sequence[int],
    turns: Sequence[Turn],
    codec: ChatCodec,
    mode: TemplateCheck,
    images: Sequence[ImageInput] = (),
    *,
    in_chat: bool,
) -> str:
    """Describe the first difference between a trajectory and the chat template's rendering.

    The description contains the difference and the text before it; it is empty if there is none. A
    conversation that the template cannot render differs, too.
    With the mode `ignore_strippable` white space does not count. `images` are those of the
    response, and `in_chat` says whether tools answer in chat messages.
    """
    if mode is TemplateCheck.off:
        return ""
    messages = build_messages(prompt, turns, images, in_chat=in_chat)
    ends_in_assistant_turn = messages[-1]["role"] == "assistant"
    try:
        rendered_ids = codec.apply_chat_template(
            messages, prompt.tool_schemas or None, add_generation_prompt=not ends_in_assistant_turn
        )
    except ValueError as error:  # for example, it drops images from messages of the assistant
        return f"the template cannot render the conversation: {error}"
    expected = codec.decode_with_special_tokens(rendered_ids)
    got = codec.decode_with_special_tokens((*prompt.token_ids, *token_ids))
    end = codec.turn_end_text if ends_in_assistant_turn else ""
    if mode is TemplateCheck.ignore_strippable:
        expected, got, end = ("".join(text.split()) for text in (expected, got, end))
    expected = _trim_end_text(expected, got, end)
    return "" if expected == got else _describe_difference(expected, got)


def _trim_end_text(expected: str, got: str, end: str) -> str:
    """Remove from the end text of `expected` the part that `got` lacks."""
    if not expected.endswith(end):
        return expected
    size = next(size for size in range(len(end), -1, -1) if got.endswith(end[:size]))
    return expected[: len(expected) - len(end) + size]


def _describe_difference(expected: str, got: str) -> str:
    start = _common_prefix_len(expected, got)
    stop = -_common_prefix_len(expected[start:][::-1], got[start:][::-1]) or None
    before = expected[max(0, start - MAX_SHOWN_CHARS) : start]
    return (
        f"after {before!r} the template has {_shorten(expected[start:stop])}, "
        f"the trajectory {_shorten(got[start:stop])}"
    )


def _common_prefix_len(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )


def _shorten(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARS:
        return repr(text)
    return f"{text[:MAX_SHOWN_CHARS]!r}... ({len(text)} characters)"
