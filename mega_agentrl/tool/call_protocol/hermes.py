"""JSON function calls in the model's chat format, as Hermes and Qwen models write them.

A call is a JSON object between tags::

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>

A turn may hold several calls. Text before the last `</think>` is reasoning; calls in it are
ignored. The engine stops only at the end of the turn. A call that cannot be parsed becomes an
`InvalidToolCall` whose message tells the policy what was expected; whether the tool exists and
accepts the arguments is checked by the session. Responses are chat messages of role tool, which the
chat template formats. Nothing here runs a tool.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.call_protocol.escape import ControlTagEscaper
from mega_agentrl.types.records import AssistantText, InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN_TOOL = "unnamed"
"""Tool name of a call whose name cannot be parsed."""

MAX_NAME_CHARS = 64

REASONING_START, REASONING_END = "<think>", "</think>"
_OPEN_TAG, _CLOSE_TAG = "<tool_call>", "</tool_call>"
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
        return (_OPEN_TAG, _CLOSE_TAG)

    def parse_calls(self, turn_text: str) -> tuple[ToolCall | InvalidToolCall, ...]:
        """Return the calls of a turn in order."""
        visible_text = turn_text.rpartition(REASONING_END)[2]
        chunks = visible_text.split(_OPEN_TAG)[1:]
        return tuple(self._parse_call(chunk) for chunk in chunks)

    def split_turn(self, turn_text: str) -> AssistantText:
        """Return reasoning, content and valid calls; invalid calls stay in the content."""
        reasoning, visible_text = split_reasoning(turn_text)
        content, *chunks = visible_text.split(_OPEN_TAG)
        calls: list[ToolCall] = []
        for chunk in chunks:
            call = self._parse_call(chunk)
            if isinstance(call, ToolCall):
                calls.append(call)
                content += chunk.partition(_CLOSE_TAG)[2]
            else:
                content += _OPEN_TAG + chunk
        return AssistantText(reasoning=reasoning, content=content.strip(), calls=tuple(calls))

    def render(self, answer: str) -> str:
        """Return the content of the message for a response."""
        return self.escape(answer)

    def escape(self, text: str) -> str:
        """Return `text` without control tags; escaping twice changes nothing more."""
        return self._escaper(text)

    def _parse_call(self, chunk: str) -> ToolCall | InvalidToolCall:
        """Parse the text between one opening tag and the next."""
        body, close, _ = chunk.partition(_CLOSE_TAG)
        if not close:
            return self._bad_call(UNKNOWN_TOOL, "the closing tag is missing")
        try:
            call = _parse_json(body)
        except (ValueError, RecursionError) as error:
            return self._bad_call(_guess_tool_name(body), f"it is not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._bad_call(UNKNOWN_TOOL, "it has no name")
        name, arguments = call["name"][:MAX_NAME_CHARS], call.get("arguments", {})
        if isinstance(arguments, str):  # as in OpenAI's API
            try:
                arguments = _parse_json(arguments)
            except (ValueError, RecursionError) as error:
                return self._bad_call(name, f"its arguments are not JSON: {error}")
        if not isinstance(arguments, dict):
            return self._bad_call(name, "its arguments are not an object")
        return ToolCall(tool=name, arguments=arguments)

    def _bad_call(self, name: str, what: str) -> InvalidToolCall:
        message = f"This call cannot be read: {what}. Expected {_EXPECTED_FORMAT}."
        return InvalidToolCall(tool=name, message=self.escape(message))


def format_call(call: ToolCall) -> str:
    """Return a call as a policy writes it."""
    body = json.dumps({"name": call.tool, "arguments": call.arguments})
    return f"{_OPEN_TAG}\n{body}\n{_CLOSE_TAG}"


def split_reasoning(turn_text: str) -> tuple[str, str]:
    """Return the chain of thought and the rest of a turn, without markers and outer white space.

    A chain of thought that was not closed leaves no rest.
    """
    reasoning, end, rest = turn_text.rpartition(REASONING_END)
    if not end and turn_text.lstrip().startswith(REASONING_START):
        reasoning, rest = rest, ""
    return reasoning.strip().removeprefix(REASONING_START).strip(), rest.strip()


def _guess_tool_name(body: str) -> str:
    """Return the tool that a broken call probably means, for the records."""
    match = re.search(r'"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"', body)
    return match[1] if match else UNKNOWN_TOOL


def _parse_json(text: str) -> Any:
    """Parse JSON; half a surrogate pair, which cannot be written to a file, becomes `?`."""
    value = json.loads(text, parse_constant=_reject_constant)
    if "\\ud" not in text.lower():
        return value
    plain = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    return json.loads(plain)


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")
