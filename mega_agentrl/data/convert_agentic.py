"""Open-Agentic-tool-use: conversations with tool calls, one RL row for each answer that calls.

A row has `messages` (or `conversations`) and `tools`, as lists or as their JSON text. Messages are
`{"role", "content", "tool_calls"}` or ShareGPT's `{"from", "value"}`; calls stand in `tool_calls`,
between `<tool_call>` tags, or in a message of role `function_call`. Rows of the shape `query`,
`tools`, `answers` are taken as well (`convert_xlam`).

The prompt is everything before the answer, with earlier calls in the form that is asked for
(`convert_calls`) and what tools answered as role `tool`; the ground truth is the answer's calls.
Reasoning of earlier answers is left out of the prompt, as chat templates of reasoning models do.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mega_agentrl.data.convert_calls import calls_text, read_call, system_message
from mega_agentrl.data.convert_row import Converted, SourceRow, rl_row, unique_index
from mega_agentrl.data.convert_xlam import convert_xlam
from mega_agentrl.types.records import Message

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r".*</think>", re.DOTALL)
_NO_CALLS = "left out: conversations without a call"
_NO_QUESTION = "left out: calls before the first question"


def convert_agentic(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """RL rows for all conversations; raises ValueError that names the row and field."""
    if rows and "query" in rows[0].values:
        return convert_xlam(rows, data_source)
    seen: set[str] = set()
    result = Converted([])
    for place, row in enumerate(rows):
        made = _conversation(row, unique_index(row, place, seen), data_source, result.notes)
        result.notes[_NO_CALLS] += not made
        result.rows.extend(made)
    return Converted(result.rows, +result.notes)


def _conversation(
    row: SourceRow, name: str, data_source: str, notes: Counter[str]
) -> list[dict[str, Any]]:
    field = "messages" if row.values.get("messages") is not None else "conversations"
    history: list[Message] = []
    own: list[str] = []
    tools = row.items("tools") if row.values.get("tools") is not None else []
    made: list[dict[str, Any]] = []
    for message in row.items(field):
        role, text = _role_and_text(message, row, field)
        calls = _calls(message, role, text, row, field)
        if role == "system":
            own.append(text)
        elif not calls:
            history.append({"role": role, "content": _THOUGHT.sub("", text).strip()})
        else:
            truth = calls_text(calls, row, field)
            if any(earlier["role"] == "user" for earlier in history):
                made.append(
                    rl_row(
                        data_source=data_source,
                        messages=[system_message(tools, "\n\n".join(own)), *history],
                        ground_truth=truth,
                        ability="function_calling",
                        extra_info={"index": f"{name}/{len(made)}", "num_calls": len(calls)},
                    )
                )
            else:
                notes[_NO_QUESTION] += 1
            history.append({"role": "assistant", "content": truth})
    return made


def _role_and_text(message: Any, row: SourceRow, field: str) -> tuple[str, str]:
    """The role as this project names it (`call` for a message that is calls), and the content."""
    if not isinstance(message, dict):
        raise row.error(field, message, "a message, with role and content or from and value")
    given = message.get("role", message.get("from"))
    if not isinstance(given, str) or given not in _ROLES:
        raise row.error(field, message, f"a role, one of {', '.join(_ROLES)}")
    content = message.get("content", message.get("value"))
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise row.error(field, message, "a message whose content is text")
    return _ROLES[given], content


def _calls(message: Any, role: str, text: str, row: SourceRow, field: str) -> list[dict[str, Any]]:
    """The calls that a message makes; none but for an assistant's."""
    if role not in ("assistant", "call"):
        return []
    given = message.get("tool_calls")
    text = _THOUGHT.sub("", text)
    if given:
        calls = _json(given, row, field) if isinstance(given, str) else given
    elif _TAGGED.search(text):
        calls = [_json(piece, row, field) for piece in _TAGGED.findall(text)]
    elif role == "call":
        calls = _json(text, row, field)
    else:
        return []
    listed = calls if isinstance(calls, list) else [calls]
    return [read_call(call, row, field) for call in listed]


def _json(text: str, row: SourceRow, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise row.error(field, text, f"a call as JSON ({error})", "a call that was cut") from error
