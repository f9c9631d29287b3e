"""Reads one JSON call behind its opening tag, in the forms in which policies write it.

A call ends where its JSON object ends, so that its texts may contain the tags. Besides
`{"name": ..., "arguments": {...}}` these forms are read: `parameters` in place of `arguments`, as
Llama writes; the call inside `{"type": "function", "function": {...}}`, as in OpenAI's API; an
object that is encoded as a text, once or several times; null or an empty text for no arguments;
line breaks within texts. Anything else is an `UnreadableCall`, which says what is wrong.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mega_agentrl.tool.call_protocol.json_text import (
    check_depth,
    decode_nested,
    decode_prefix,
    without_surrogates,
)
from mega_agentrl.types.records import ToolCall

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"

UNKNOWN_TOOL = "unnamed"
"""Tool name of a call whose name cannot be parsed."""

MAX_NAME_CHARS = 64

_MAX_SHOWN_KEYS, _MAX_SHOWN_KEY_CHARS = 5, 40
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("name", "type", "id")

_BLANK = re.compile(r"\s*+")
_END = re.compile(rf"\s*+(?:{CLOSE_TAG}|\Z)")
# Up to the first tag that is not within a text; a text that the line leaves open is none. Every
# alternative is possessive, so that the time is linear.
_BODY = re.compile(r'(?:"(?:[^"\\\n]++|\\.)*+"|\\.|[^"\\<]++|["\\]|<(?!/?tool_call>))*+')
_TEXT_TAG = re.compile(r"<(?=\||/?(?:think|tool_call|tool_response)>)")
_ESCAPED = r"\\u003c"
_NAME = re.compile(r'"name"\s*+:\s*+"([A-Za-z0-9_-]{1,64})"')


@dataclass(slots=True, frozen=True)
class UnreadableCall:
    """A call that cannot be read."""

    tool: str
    """Name of the tool, as far as it can be read."""
    problem: str
    """The reason, which completes a sentence that begins with the call."""


def read_call(text: str, start: int) -> tuple[ToolCall | UnreadableCall, int]:
    """Read the call behind an opening tag.

    Args:
        text: The text of a turn.
        start: Position behind the opening tag.

    Returns:
        The call, and the position behind it and its closing tag.
    """
    begin = _match(_BLANK, text, start).end()
    try:
        value, end = decode_prefix(text, begin)
        if closing := _END.match(text, end):
            return _as_call(value, text[begin:end]), closing.end()
        problem = "there is text behind its object, or the closing tag is missing"
    except (ValueError, RecursionError) as error:
        problem = f"it is not JSON: {_describe(error, text, begin)}"
    end = _match(_BODY, text, start).end()
    tool = _guess_tool_name(text[start:end])
    if text.startswith(CLOSE_TAG, end):
        end += len(CLOSE_TAG)
    return UnreadableCall(tool, problem), end


def format_call(call: ToolCall) -> str:
    """Return a call as a policy writes it.

    The first character of a tag or marker in its texts is written as an escape sequence of JSON, so
    that the only tags are those around the call. Readers of the JSON get the texts unchanged.
    """
    body = json.dumps({"name": call.tool, "arguments": call.arguments})
    return f"{OPEN_TAG}\n{_TEXT_TAG.sub(_ESCAPED, body)}\n{CLOSE_TAG}"


def _as_call(value: Any, source: str) -> ToolCall | UnreadableCall:
    """Return the call that a JSON value describes; `source` is its text."""
    try:
        check_depth(value)
        value = decode_nested(value)
    except ValueError as error:
        return UnreadableCall(_guess_tool_name(source), f"it is not JSON: {error}")
    value = without_surrogates(value)
    if isinstance(value, dict) and "name" not in value and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return UnreadableCall(UNKNOWN_TOOL, "it has no name")
    name = value["name"][:MAX_NAME_CHARS]
    unknown = [key for key in value if key not in (*_ARGUMENT_KEYS, *_OTHER_KEYS)]
    if unknown and not any(key in value for key in _ARGUMENT_KEYS):
        shown = ", ".join(key[:_MAX_SHOWN_KEY_CHARS] for key in unknown[:_MAX_SHOWN_KEYS])
        return UnreadableCall(name, f"it has no arguments, but {shown}")
    try:
        arguments = _find_arguments(value)
    except ValueError as error:
        return UnreadableCall(name, f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return UnreadableCall(name, "its arguments are not an object")
    return ToolCall(tool=name, arguments=without_surrogates(arguments))


def _find_arguments(call: dict[str, Any]) -> Any:
    """Return the arguments of a call, {} for none; raises `ValueError` for a text of no JSON."""
    for key in _ARGUMENT_KEYS:
        arguments = decode_nested(call.get(key))
        if arguments is not None:
            return arguments
    return {}


def _describe(error: ValueError | RecursionError, text: str, begin: int) -> str:
    """Return what is wrong with a body that begins at `begin`."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= len(text) or text.startswith(CLOSE_TAG, error.pos):
        return "a brace or bracket is missing at its end"
    return f"{error.msg} at character {error.pos - begin + 1}"


def _guess_tool_name(body: str) -> str:
    """Return the tool that a broken call probably means, for the records."""
    match = _NAME.search(body)
    return match[1] if match else UNKNOWN_TOOL


def _match(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str]:
    match = pattern.match(text, start)
    assert match is not None, "the pattern matches the empty text"
    return match
