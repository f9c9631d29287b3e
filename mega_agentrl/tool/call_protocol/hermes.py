"""JSON function calls in the model's chat format, as Hermes and Qwen models write them.

A call is a JSON object between tags::

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>

A turn may hold several calls; `json_call` says in which forms. The closing tag of the last one may
be missing. Calls inside the reasoning are ignored. The engine stops only at the end of the turn. A
call that cannot be read becomes an `InvalidToolCall` whose message tells the policy what was
expected; whether the tool exists and accepts the arguments is checked by the session. Responses are
chat messages of role tool, which the chat template formats. Nothing here runs a tool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.tool.call_protocol.escape import ControlTagEscaper
from mega_agentrl.tool.call_protocol.json_call import (
    CLOSE_TAG,
    OPEN_TAG,
    UnreadableCall,
    read_call,
)
from mega_agentrl.types.records import AssistantText, InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

REASONING_START, REASONING_END = "<think>", "</think>"

MAX_UNREADABLE_CALLS = 100
"""Calls of a turn that cannot be read, behind which the rest of the turn is text. The end of each
is looked for in all text behind it, so that the time would grow with the square of the turn."""

_MARK = re.compile(f"{REASONING_START}|{REASONING_END}|{OPEN_TAG}")
_OPENED_REASONING = re.compile(rf"{REASONING_START}\s*\Z")
_EXPECTED_FORMAT = 'a JSON object {"name": ..., "arguments": {...}} between the tool_call tags'


class HermesProtocol:
    """Parses the calls of a turn.

    Args:
        names: names of the tools.
        control_tokens: texts of the tokenizer's special tokens, which are escaped in responses.
    """

    def __init__(self, names: Iterable[str], control_tokens: Iterable[str] = ()) -> None:
        self._escaper = ControlTagEscaper(names, control_tokens)

    @property
    def uses_tool_messages(self) -> bool:
        """True: responses are separate messages."""
        return True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Empty: a turn with several calls ends by itself."""
        return ()

    @property
    def call_markers(self) -> tuple[str, ...]:
        """The tags around calls."""
        return (OPEN_TAG, CLOSE_TAG)

    def parse_calls(self, turn_text: str) -> tuple[ToolCall | InvalidToolCall, ...]:
        """Return the calls of a turn in order."""
        calls = (piece.call for piece in _split(turn_text))
        return tuple(
            call if isinstance(call, ToolCall) else self._invalid_call(call)
            for call in calls
            if call is not None
        )

    def split_turn(self, turn_text: str) -> AssistantText:
        """Return reasoning, content and valid calls; invalid calls stay in the content."""
        pieces = _split(turn_text)
        calls = tuple(piece.call for piece in pieces if isinstance(piece.call, ToolCall))
        content = [piece for piece in pieces if not isinstance(piece.call, ToolCall)]
        reasoning, text = _join(content)
        return AssistantText(reasoning=reasoning, content=text, calls=calls)

    def render(self, answer: str) -> str:
        """Return the content of the message for a response."""
        return self.escape(answer)

    def escape(self, text: str) -> str:
        """Return `text` without control tags; escaping twice changes nothing more."""
        return self._escaper(text)

    def _invalid_call(self, call: UnreadableCall) -> InvalidToolCall:
        message = f"This call cannot be read: {call.problem}. Expected {_EXPECTED_FORMAT}."
        return InvalidToolCall(tool=call.tool, message=self.escape(message))


def opened_reasoning(context_text: str) -> str:
    """Return the marker with which the generation prompt opens the reasoning of the next turn.

    Many templates end the prompt with the marker, so that a turn has the closing one alone, and
    none if it is cut off. What this returns belongs before the text of such a turn.

    Args:
        context_text: The end of the text before the turn.

    Returns:
        The marker with the white space behind it; empty if the prompt opens no reasoning.
    """
    match = _OPENED_REASONING.search(context_text)
    return match[0] if match else ""


def split_reasoning(turn_text: str) -> tuple[str, str]:
    """Return the chain of thought and the rest of a turn, without markers and outer white space.

    A chain of thought that was not closed leaves no rest.
    """
    return _join(_split(turn_text))


@dataclass(slots=True, frozen=True)
class _Piece:
    """A part of a turn."""

    text: str
    """The text that the policy wrote; reasoning is without its markers."""
    is_reasoning: bool = False
    call: ToolCall | UnreadableCall | None = None


def _split(turn_text: str) -> list[_Piece]:
    """Return reasoning, calls and the text between them, in order.

    Reasoning reaches from its opening marker to the next closing one, or to the end. A closing
    marker before any reasoning has been opened ends one that began before the turn. Markers within
    the JSON of a call are text of the call. All behind `MAX_UNREADABLE_CALLS` is text.
    """
    pieces: list[_Piece] = []
    start = place = 0
    has_reasoning = False
    num_unreadable = 0
    while mark := _MARK.search(turn_text, place):
        place = mark.end()
        if mark[0] == REASONING_END:
            if not has_reasoning:
                pieces = [_Piece(turn_text[: mark.start()], is_reasoning=True)]
                start, has_reasoning = place, True
            continue
        pieces.append(_Piece(turn_text[start : mark.start()]))
        if mark[0] == REASONING_START:
            end = turn_text.find(REASONING_END, place)
            end = len(turn_text) if end < 0 else end
            pieces.append(_Piece(turn_text[place:end], is_reasoning=True))
            place, has_reasoning = min(end + len(REASONING_END), len(turn_text)), True
        else:
            call, place = read_call(turn_text, place)
            pieces.append(_Piece(turn_text[mark.start() : place], call=call))
            num_unreadable += isinstance(call, UnreadableCall)
        start = place
        if num_unreadable >= MAX_UNREADABLE_CALLS:
            break
    pieces.append(_Piece(turn_text[start:]))
    return pieces


def _join(pieces: Iterable[_Piece]) -> tuple[str, str]:
    """Return the reasoning and the other text of the pieces."""
    reasoning: list[str] = []
    content: list[str] = []
    for piece in pieces:
        (reasoning if piece.is_reasoning else content).append(piece.text)
    thoughts = filter(None, (thought.strip() for thought in reasoning))
    return "\n".join(thoughts), "".join(content).strip()
