"""Chat messages of a dataset's cells, brought into one form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.data.table_reader import drop_nulls, plain_value
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Message

_ROLES_WITHOUT_TEXT = ("assistant", "tool")
"""Roles whose messages may have no text: calls alone, or the answer of a tool that is empty."""


def validate_messages(value: Any, where: str, *, with_parts: bool = False) -> tuple[Message, ...]:
    """Return the chat messages of a cell in one form.

    A content of text parts becomes their joined text, a null content of the assistant or a tool an
    empty text, and arguments of `tool_calls` that are JSON text become objects, as chat templates
    expect them.

    Args:
        value: the cell.
        where: name of the cell, for errors.
        with_parts: whether contents may have parts that are no text (see `prompt_images`).

    Raises:
        ValueError: the cell holds something else.
    """
    messages = drop_nulls(plain_value(value))
    if not isinstance(messages, list) or not messages:
        raise InputError(where, value, "a non-empty list of chat messages")
    return tuple(_validate_message(message, where, with_parts=with_parts) for message in messages)


def _validate_message(message: Any, where: str, *, with_parts: bool) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise InputError(where, message, "a message with string members role and content")
    content = message.get("content", "" if role in _ROLES_WITHOUT_TEXT else None)
    if isinstance(content, list):
        _validate_parts(content, where, with_parts=with_parts)
        if not with_parts:
            content = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise InputError(
            where, message, "a message whose content is a text or a list of parts with a type"
        )
    checked = {**message, "content": content}
    if "tool_calls" in message:
        checked["tool_calls"] = _validate_calls(message["tool_calls"], where)
    return checked


def _validate_parts(parts: Sequence[Any], where: str, *, with_parts: bool) -> None:
    kinds = ("image", "image_url", "video") if with_parts else ()
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        if not (kind == "text" and isinstance(fields.get("text"), str)) and kind not in kinds:
            expected = '{"type": "text", "text": ...}'
            raise InputError(
                f"{where}, part of a message",
                part,
                f"{expected} or a part of type {', '.join(kinds)}" if kinds else expected,
                "" if kinds else "images or videos for a model without a vision tower",
            )


def _validate_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message in the form `{"function": {"name": ..., "arguments": {...}}}`.

    Further members, such as `id` and `type`, are kept.
    """
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        members = call if isinstance(call, dict) else {}
        bare = {key: members[key] for key in ("name", "arguments") if key in members}
        function = members.get("function", bare)
        fields = function if isinstance(function, dict) else {}
        name, arguments = fields.get("name"), fields.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = parse_json(arguments or "{}")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise InputError(
                f"{where}, tool_calls",
                call,
                'calls {"function": {"name": ..., "arguments": {...}}}; arguments may be JSON text',
            )
        others = {key: item for key, item in members.items() if key not in bare}
        checked.append({**others, "function": {**fields, "name": name, "arguments": arguments}})
    return checked
