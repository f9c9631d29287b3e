"""ARPO's tag protocol: a call is `<tool>text</tool>`, its answer a `<result>` block.

The engine stops at a closing tag. The call's text is what stands between the last opening
tag before the final closing tag and that closing tag. Nothing here runs a tool. What tool
output may hold is `escape`'s business.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.tool.escape import ControlEscape
from mega_agentrl.types.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_TAIL_CHARS = 8


class TagProtocol:
    """Parses calls of the given tools and renders their answers.

    arguments: the argument name by tool, in the order the stop strings get.
    control_tokens: texts that the model's tokenizer has a token of its own for.
    escapes: False lets what tools say through as it is, as ARPO's published code does.
    """

    def __init__(
        self,
        arguments: Mapping[str, str],
        control_tokens: Iterable[str] = (),
        *,
        escapes: bool = True,
    ) -> None:
        for name in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("think", "answer", "result"):
                raise ValueError(
                    f"tool name {name!r}: expected lower-case letters, digits and underscores, "
                    "other than think, answer and result; it becomes a tag"
                )
        self._arguments = dict(arguments)
        self._control = ControlEscape(arguments, control_tokens) if escapes else None

    @property
    def in_chat(self) -> bool:
        """Answers are text of the assistant's own turn."""
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags after which the engine must stop."""
        return tuple(f"</{name}>" for name in self._arguments)

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags of the calls."""
        return tuple(f"<{slash}{name}>" for name in self._arguments for slash in ("", "/"))

    def parse(self, turn_text: str) -> ToolCall | None:
        """The call an assistant turn ends in; None where there is none or it is empty.

        A token may reach beyond the stop string: up to 8 trailing characters without a
        letter or digit are allowed.
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

    def read(self, turn_text: str) -> tuple[ToolCall, ...]:
        """What `parse` finds, as a sequence of one or none."""
        call = self.parse(turn_text)
        return () if call is None else (call,)

    def render(self, answer: str) -> str:
        """The text appended to the context for an answer."""
        return f" <result>\n{self.escape(answer)}\n</result>"

    def escape(self, text: str) -> str:
        """`text` without control tags; escaping twice changes nothing more."""
        return text if self._control is None else self._control(text)
