"""Conversations through a tokenizer's chat template, whole or one turn after the other.

A conversation that grows is never rendered again: what a message adds is rendered behind a
fixed base conversation, and everything the base itself renders to, its assistant turn and the
end of that turn included, is taken away. So a template that rewrites earlier turns (drops old
reasoning, adds empty reasoning to the last turn) leaves what was sampled alone; that the sum
is not what the template makes of the whole is for the caller to find (`ids` without a
generation prompt).

Special tokens are the template's alone: where a message contains the text of one, that text is
rendered as a placeholder and encoded letter by letter. Pieces meet at the borders of
turns only, so merges inside of what the template writes stay as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.types.records import Message

_SENTINEL = "Noted: 7c4e1f."
_BASE_CHAT: tuple[Message, ...] = (
    {"role": "user", "content": "Note this."},
    {"role": "assistant", "content": _SENTINEL},
)
_PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, as placeholders."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        texts = special | {str(token) for token in tokenizer.all_special_tokens}
        # Longest first: one may contain another.
        self._special = sorted(texts, key=lambda text: (-len(text), text))

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generate: bool = True,
    ) -> list[int]:
        """Ids of the conversation; generate: followed by the generation prompt."""
        hidden, texts = self._hide(messages)
        return self._encode(self._render(hidden, tools, generate=generate), texts)

    def next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids between an assistant turn's eos and the next assistant turn."""
        hidden, texts = self._hide(messages)
        text = self._render((*_BASE_CHAT, *hidden), None, generate=True)
        eos = str(self._tokenizer.eos_token)
        _, found, tail = text.partition(_SENTINEL)
        if not found or eos not in tail:
            raise ValueError(
                "chat template: cannot append a turn, expected it to render what the assistant "
                f"said, followed by {eos!r}, before a message of role "
                f"{messages[0]['role'] if messages else '(none)'}; probable cause: it drops "
                "earlier turns, or the tokenizer's eos_token is not what ends a turn"
            )
        return self._encode(tail[tail.index(eos) + len(eos) :], texts)

    def end_text(self) -> str:
        """What the template writes behind the last assistant turn's text."""
        text = self._render(_BASE_CHAT, None, generate=False)
        return text.partition(_SENTINEL)[2]

    def _hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """The messages with placeholders for special tokens, and what these stand for."""
        said = [str(message.get("content", "")) for message in messages]
        found = [text for text in self._special if any(text in part for part in said)]
        free = _unused(said)
        marks = {text: next(free) for text in found}
        hidden: list[Message] = []
        for message, part in zip(messages, said, strict=True):
            # Half a surrogate pair, which a tool may print but no tokenizer takes, becomes `?`.
            clean = part.encode("utf-8", "replace").decode("utf-8")
            for text, mark in marks.items():
                clean = clean.replace(text, mark)
            hidden.append({**message, "content": clean})
        return hidden, {mark: text for text, mark in marks.items()}

    def _encode(self, text: str, texts: Mapping[str, str]) -> list[int]:
        """Ids of rendered text; placeholders become the plain text they stand for."""
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
        generate: bool,
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "chat template: the tokenizer has none, expected chat_template.jinja or "
                "chat_template in tokenizer_config.json; base models come without one"
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=generate,
            tokenize=False,
        )
        return str(text)


def _unused(texts: Sequence[str]) -> Iterator[str]:
    """Private characters that occur in none of the texts."""
    return (mark for mark in map(chr, _PRIVATE) if not any(mark in text for text in texts))
