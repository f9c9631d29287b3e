"""Converts Open-Agentic-tool-use conversations to one RL row per assistant answer with calls.

A row has `messages` (or `conversations`) and `tools`, as lists or as JSON text. Messages are
`{"role", "content", "tool_calls"}` or ShareGPT's `{"from", "value"}`; calls are in `tool_calls`,
between `<tool_call>` tags, or in a message of role `function_call`. Rows with `query`, `tools` and
`answers` are also accepted (`convert_xlam`).

The prompt is everything before the answer, with earlier calls in the requested form
(`function_calls`) and tool results as role `tool`; the ground truth is the answer's calls.
Reasoning of earlier answers is removed from the prompt, as chat templates of reasoning models do.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.data.converters.function_calls import (
    format_calls_json,
    make_system_message,
    parse_json_call,
)
from mega_agentrl.data.converters.source_row import (
    ConversionResult,
    SourceRow,
    convert_each,
    make_rl_row,
    unique_row_id,
)
from mega_agentrl.data.converters.xlam import convert_xlam
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
_TOOL_CALL_TAG = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_REASONING = re.compile(r".*</think>", re.DOTALL)
_NOTE_NO_CALLS = "left out: conversations without a call"
_NOTE_NO_QUESTION = "left out: calls before the first question"


def convert_agentic(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert the conversations (`convert_each`)."""
    if rows and "query" in rows[0].values:
        return convert_xlam(rows, data_source)
    row_ids: set[str] = set()
    notes: Counter[str] = Counter()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        name = unique_row_id(row, place, row_ids)
        answer_rows = _conversation_rows(row, name, data_source, notes)
        if not answer_rows:
            notes[_NOTE_NO_CALLS] += 1
        return answer_rows

    return convert_each(rows, convert, notes)


def _conversation_rows(
    row: SourceRow, name: str, data_source: str, notes: Counter[str]
) -> list[dict[str, Any]]:
    field = "messages" if row.values.get("messages") is not None else "conversations"
    history: list[Message] = []
    system_texts: list[str] = []
    tools = row.get_list("tools") if row.values.get("tools") is not None else []
    answer_rows: list[dict[str, Any]] = []
    for message in row.get_list(field):
        role, text = _role_and_text(message, row, field)
        calls = _message_calls(message, role, text, row, field)
        if role == "system":
            system_texts.append(text)
        elif not calls:
            history.append({"role": role, "content": _REASONING.sub("", text).strip()})
        else:
            truth = format_calls_json(calls, row, field)
            if any(earlier["role"] == "user" for earlier in history):
                system = make_system_message(tools, "\n\n".join(system_texts))
                answer_rows.append(
                    make_rl_row(
                        data_source=data_source,
                        messages=[system, *history],
                        ground_truth=truth,
                        ability="function_calling",
                        extra_info={"index": f"{name}/{len(answer_rows)}", "num_calls": len(calls)},
                    )
                )
            else:
                notes[_NOTE_NO_QUESTION] += 1
            history.append({"role": "assistant", "content": truth})
    return answer_rows


def _role_and_text(message: Any, row: SourceRow, field: str) -> tuple[str, str]:
    """Return the normalised role, `call` for a message of calls, and the content."""
    if not isinstance(message, dict):
        raise row.error(field, message, "a message, with role and content or from and value")
    source_role = message.get("role", message.get("from"))
    if not isinstance(source_role, str) or source_role not in _ROLES:
        raise row.error(field, message, f"a role, one of {', '.join(_ROLES)}")
    content = message.get("content", message.get("value"))
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise row.error(field, message, "a message whose content is text")
    return _ROLES[source_role], content


def _message_calls(
    message: Any, role: str, text: str, row: SourceRow, field: str
) -> list[dict[str, Any]]:
    """Return the calls of an assistant message, [] for any other message."""
    if role not in ("assistant", "call"):
        return []
    raw_calls = message.get("tool_calls")
    text = _REASONING.sub("", text)
    if raw_calls:
        calls = _parse_call_json(raw_calls, row, field) if isinstance(raw_calls, str) else raw_calls
    elif _TOOL_CALL_TAG.search(text):
        calls = [_parse_call_json(piece, row, field) for piece in _TOOL_CALL_TAG.findall(text)]
    elif role == "call":
        calls = _parse_call_json(text, row, field)
    else:
        return []
    call_list = calls if isinstance(calls, list) else [calls]
    return [parse_json_call(call, row, field) for call in call_list]


def _parse_call_json(text: str, row: SourceRow, field: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise row.error(field, text, f"a call as JSON ({error})", "a call that was cut") from error
