"""Renders and encodes conversations through a tokenizer's chat template, whole or turn by turn.

A growing conversation is never rendered again. New messages are rendered behind a fixed base
conversation, and everything that the base itself renders to, up to the eos of its assistant turn,
is removed. So a template that rewrites earlier turns (drops old reasoning, adds empty reasoning to
the last turn) does not change what was sampled. The caller checks whether the sum of the pieces is
what the template renders for the whole conversation.

Only the template produces special tokens: where the text of a message contains one, it is rendered
as a placeholder and encoded as plain text. Pieces meet only at turn boundaries, so that merges
inside of the template's text are not affected.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.types.records import Message

_SENTINEL = "Noted: 7c4e1f."
_BASE_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Note this."},
    {"role": "assistant", "content": _SENTINEL},
)
_PRIVATE_USE_CODEPOINTS = range(0xF0000, 0xFFFFE)
"""Code points without a meaning, used as placeholders."""


class ChatTemplate:
    """Encodes messages with the chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        texts = special | {str(token) for token in tokenizer.all_special_tokens}
        # Longest first: one may contain another.
        self._special_tokens = sorted(texts, key=lambda text: (-len(text), text))

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of the conversation, by default followed by the generation prompt."""
        hidden, texts = self._replace_special_tokens(messages)
        return self._encode_rendered(
            self._render(hidden, tools, add_generation_prompt=add_generation_prompt), texts
        )

    def encode_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids between an assistant turn's eos and the next assistant turn."""
        hidden, texts = self._replace_special_tokens(messages)
        text = self._render((*_BASE_CONVERSATION, *hidden), None, add_generation_prompt=True)
        eos = str(self._tokenizer.eos_token)
        _, found, tail = text.partition(_SENTINEL)
        if not found or eos not in tail:
            raise ValueError(
                "chat template: cannot append a turn, expected it to render the assistant's "
                f"text, followed by {eos!r}, before a message of role "
                f"{messages[0]['role'] if messages else '(none)'}; probable cause: it drops "
                "earlier turns, or the tokenizer's eos_token is not what ends a turn"
            )
        return self._encode_rendered(tail[tail.index(eos) + len(eos) :], texts)

    def turn_end_text(self) -> str:
        """Return what the template writes after the text of the last assistant turn."""
        text = self._render(_BASE_CONVERSATION, None, add_generation_prompt=False)
        return text.partition(_SENTINEL)[2]

    def _replace_special_tokens(
        self, messages: Sequence[Message]
    ) -> tuple[list[Message], dict[str, str]]:
        """Replace special tokens by placeholders; return the messages and the replaced texts."""
        contents = [str(message.get("content", "")) for message in messages]
        found = [text for text in self._special_tokens if any(text in part for part in contents)]
        free = _unused_placeholders(contents)
        marks = {text: next(free) for text in found}
        hidden: list[Message] = []
        for message, part in zip(messages, contents, strict=True):
            # A lone surrogate, which a tool may print but no tokenizer accepts, becomes `?`.
            clean = part.encode("utf-8", "replace").decode("utf-8")
            for text, mark in marks.items():
                clean = clean.replace(text, mark)
            hidden.append({**message, "content": clean})
        return hidden, {mark: text for text, mark in marks.items()}

    def _encode_rendered(self, text: str, texts: Mapping[str, str]) -> list[int]:
        """Encode rendered text; placeholders become the plain text they stand for."""
        if not texts:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece in re.split(f"([{''.join(texts)}])", text):
            plain = piece in texts
            ids += self._tokenizer.encode(
                texts.get(piece, piece), add_special_tokens=False, split_special_tokens=plain
            )
        return ids

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "chat template: the tokenizer has none, expected chat_template.jinja or "
                "chat_template in tokenizer_config.json; base models come without one"
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)


def _unused_placeholders(texts: Sequence[str]) -> Iterator[str]:
    """Yield private-use characters that occur in none of the texts."""
    return (
        mark
        for mark in map(chr, _PRIVATE_USE_CODEPOINTS)
        if not any(mark in text for text in texts)
    )
