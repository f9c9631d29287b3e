r"""Keys of chat messages: two messages with equal keys are the same message to the gateway.

Clients do not send a history back byte for byte. These differences do not change the key:

* white space around a text, and `\r\n` for `\n`;
* a text as a string, or as one or several content parts; `null` or a missing content;
* calls in the text, as the policy wrote them, or in a field of their own;
* reasoning that is dropped, summarised, sent as a field of its own, or left in the text;
* ids of tool calls, and the JSON form of their arguments: key order, spaces, escapes,
  `1.0` for `1`, large integers rounded to doubles;
* the role `developer` for `system`, and `function` for `tool`;
* the name of a tool message.

Everything else does: another text, another call, another order of messages, other images, other
tools.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import msgspec

from mega_agentrl.tool.call_protocol.hermes import HermesProtocol, split_reasoning
from mega_agentrl.vision.placeholders import content_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mega_agentrl.types.records import Message, ToolCall

MAX_DEPTH = 100
"""Nesting of arguments down to which calls are told apart."""

MAX_EXACT_INT = 2**53
"""Largest integer up to which a double represents all."""

_ENCODER = msgspec.json.Encoder(order="deterministic")
_PROTOCOL = HermesProtocol(())
_ROLE_ALIASES = {"developer": "system", "function": "tool"}


def assistant_key(content: Any, calls: Iterable[ToolCall]) -> bytes:
    """Return the key of a message of the assistant; reasoning in the content is ignored.

    Without `calls`, those in the content count: an agent that reads them there may write them anew.
    """
    text, calls = _plain_text(content), tuple(calls)
    if calls:
        text = split_reasoning(text)[1]
    else:
        parts = _PROTOCOL.split_turn(text)
        text, calls = parts.content, parts.calls
    named = [[call.tool, _normalize_numbers(call.arguments)] for call in calls]
    return _digest(["assistant", text, named])


def prefill_key(text: str) -> bytes:
    """Return the key of the beginning of an answer."""
    return _digest(["prefill", text])


def call_key(name: str, arguments: Mapping[str, Any]) -> bytes:
    """Return the key of a call of one of the run's own tools."""
    return _digest([name, _normalize_numbers(arguments)])


def block_key(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the key of consecutive messages that are not the assistant's, and of the tools.

    `variables` are those of the chat template.
    """
    key: list[Any] = [[_input_key(message) for message in messages], list(tools)]
    return _digest([*key, variables] if variables else key)


def _input_key(message: Message) -> list[Any]:
    role = _ROLE_ALIASES.get(message["role"], message["role"])
    parts: list[Any] = []
    for part in content_parts(message["content"]):
        if part["type"] != "text":
            parts.append([part["image"].image_id])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += _unix_lines(part["text"])
        else:
            parts.append(_unix_lines(part["text"]))
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return [role, *(part for part in parts if part)]


def _plain_text(content: Any) -> str:
    parts = content_parts(content)
    return _unix_lines("".join(part["text"] for part in parts if part["type"] == "text"))


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _normalize_numbers(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with its numbers as JavaScript reads and writes them.

    Whole floats up to `MAX_EXACT_INT` become integers, and larger integers doubles. What is nested
    more deeply than `depth` becomes null.
    """
    if isinstance(value, dict | list) and not depth:
        return None
    if isinstance(value, dict):
        return {key: _normalize_numbers(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(item, depth - 1) for item in value]
    if isinstance(value, int) and abs(value) > MAX_EXACT_INT:
        value = _nearest_double(value)
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_INT:
        return int(value)
    return value


def _nearest_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(_ENCODER.encode(value), digest_size=16).digest()
