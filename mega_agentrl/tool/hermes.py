"""JSON function calls in the model's own chat format, as hermes and Qwen models write them.

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>

A turn may hold several; what stands before the last `</think>` is reasoning, and calls in there
are not meant. The engine stops at nothing but the end of the turn. What is meant as a call and
cannot be read is a `BadCall` whose message tells the policy what was expected; whether the tool
exists and takes the arguments is the session's to say. Answers are chat messages of role tool:
the template writes what stands around them. Nothing here runs a tool.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.escape import ControlEscape
from mega_agentrl.types.records import BadCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

UNNAMED = "unnamed"
"""Stands for the tool of a call whose name cannot be read."""

MAX_NAME_CHARS = 64

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = 'a JSON object {"name": ..., "arguments": {...}} between the tool_call tags'


class HermesProtocol:
    """Reads the calls of a turn; names, control_tokens: see `escape.ControlEscape`."""

    def __init__(self, names: Iterable[str], control_tokens: Iterable[str] = ()) -> None:
        self._control = ControlEscape(names, control_tokens)

    @property
    def in_chat(self) -> bool:
        """Answers are messages of their own."""
        return True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """None: a turn of several calls ends by itself."""
        return ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags of the calls."""
        return (_OPEN, _CLOSE)

    def read(self, turn_text: str) -> tuple[ToolCall | BadCall, ...]:
        """The calls in the order they were written."""
        said = turn_text.rpartition("</think>")[2]
        pieces = said.split(_OPEN)[1:]
        return tuple(self._call(piece) for piece in pieces)

    def render(self, answer: str) -> str:
        """The content of the message."""
        return self.escape(answer)

    def escape(self, text: str) -> str:
        """`text` without control tags; escaping twice changes nothing more."""
        return self._control(text)

    def _call(self, piece: str) -> ToolCall | BadCall:
        """piece: from behind an opening tag to the next one."""
        body, close, _ = piece.partition(_CLOSE)
        if not close:
            return self._bad(UNNAMED, "the closing tag is missing")
        try:
            call = _parsed(body)
        except (ValueError, RecursionError) as error:
            return self._bad(_name_in(body), f"it is no JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._bad(UNNAMED, "there is no name in it")
        name, arguments = call["name"][:MAX_NAME_CHARS], call.get("arguments", {})
        if isinstance(arguments, str):  # as OpenAI's interface has it
            try:
                arguments = _parsed(arguments)
            except (ValueError, RecursionError) as error:
                return self._bad(name, f"its arguments are no JSON: {error}")
        if not isinstance(arguments, dict):
            return self._bad(name, "its arguments are no object")
        return ToolCall(tool=name, arguments=arguments)

    def _bad(self, name: str, what: str) -> BadCall:
        message = f"This call cannot be read: {what}. Expected {_FORM}."
        return BadCall(tool=name, message=self.escape(message))


def _name_in(body: str) -> str:
    """The tool a broken call is likely to mean, for the records."""
    found = re.search(r'"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"', body)
    return found[1] if found else UNNAMED


def _parsed(text: str) -> Any:
    """The JSON value; half a surrogate pair, which no file takes, becomes `?`."""
    value = json.loads(text, parse_constant=_refuse)
    if "\\ud" not in text.lower():
        return value
    plain = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    return json.loads(plain)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")
