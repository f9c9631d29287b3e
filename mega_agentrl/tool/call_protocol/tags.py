"""ARPO's tag protocol: a call is `<tool>text</tool>`, its response a `<result>` block.

The engine stops at a closing tag. The call's text is what stands between that closing tag and the
last opening tag before it. Nothing here runs a tool; `escape` handles tool output.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.tool.call_protocol.escape import ControlTagEscaper
from mega_agentrl.tool.call_protocol.hermes import split_reasoning
from mega_agentrl.types.records import AssistantText, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RESERVED_NAMES = ("think", "answer", "result")
"""Tags that no tool may have."""

_MAX_TAIL_CHARS = 8


class TagProtocol:
    """Parses calls of the given tools and renders their responses.

    Args:
        arguments: argument name by tool, in the order of the stop strings.
        control_tokens: texts of the tokenizer's special tokens.
        escapes: False passes tool output on unescaped, as ARPO's published code does.
    """

    def __init__(
        self,
        arguments: Mapping[str, str],
        control_tokens: Iterable[str] = (),
        *,
        escapes: bool = True,
    ) -> None:
        for name in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in RESERVED_NAMES:
                raise InputError(
                    "tool name",
                    name,
                    "lower-case letters, digits and underscores, other than think, answer and "
                    "result, because it becomes a tag",
                )
        self._arguments = dict(arguments)
        self._escaper = ControlTagEscaper(arguments, control_tokens) if escapes else None

    @property
    def uses_tool_messages(self) -> bool:
        """False: responses are text within the assistant's turn."""
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags at which the engine must stop."""
        return tuple(f"</{name}>" for name in self._arguments)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """The tags around calls."""
        return tuple(f"<{slash}{name}>" for name in self._arguments for slash in ("", "/"))

    def parse(self, turn_text: str) -> ToolCall | None:
        """Return the call at the end of an assistant turn, or None if there is none or it is empty.

        A token may reach beyond the stop string: up to 8 trailing characters without a letter or
        digit are allowed.
        """
        close, name = max(
            ((turn_text.rfind(f"</{name}>"), name) for name in self._arguments),
            default=(-1, ""),
        )
        if close < 0:
            return None
        tail = turn_text[close + len(f"</{name}>") :].strip()
        if len(tail) > _MAX_TAIL_CHARS or any(char.isalnum() for char in tail):
            return None
        opening = f"<{name}>"
        start = turn_text.rfind(opening, 0, close)
        content = turn_text[start + len(opening) : close].strip() if start >= 0 else ""
        return ToolCall(tool=name, arguments={self._arguments[name]: content}) if content else None

    def parse_calls(self, turn_text: str) -> tuple[ToolCall, ...]:
        """Return the result of `parse` as a sequence of one or none."""
        call = self.parse(turn_text)
        return () if call is None else (call,)

    def split_turn(self, turn_text: str) -> AssistantText:
        """Return reasoning and content; calls are part of the content."""
        reasoning, content = split_reasoning(turn_text)
        return AssistantText(reasoning=reasoning, content=content, calls=())

    def render(self, answer: str) -> str:
        """Return the text that is appended to the context for a response."""
        return f" <result>\n{self.escape(answer)}\n</result>"

    def escape(self, text: str) -> str:
        """Return `text` without control tags; escaping twice changes nothing more."""
        return text if self._escaper is None else self._escaper(text)
