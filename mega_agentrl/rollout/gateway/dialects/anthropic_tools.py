"""Schemas of the tools that Anthropic's models know by their type and that the client runs.

A request names such a tool as `{"type": "bash_20250124", "name": "bash"}`, without a schema. The
policy does not know it, so it is shown one. The fields are those of Anthropic's documentation.
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values), "description": "What to do."}


_LINE = {"type": "integer", "description": "Insert behind this line; 0 is the start of the file."}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to show, from 1; -1 is the end of the file.",
}

_FILE_FIELDS = {
    "path": _text("Path of the file or folder."),
    "file_text": _text("create: content of the new file."),
    "old_str": _text("str_replace: text to replace; it must occur exactly once."),
    "new_str": _text("str_replace: text in its place."),
    "insert_line": _LINE,
    "insert_text": _text("insert: text to insert."),
}

CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a bash shell that stays open between calls.",
        _object(
            (),
            command=_text("The command to run."),
            restart={"type": "boolean", "description": "Start a new shell instead."},
        ),
    ),
    "text_editor": (
        "View, create and edit text files.",
        _object(
            ("command", "path"),
            command=_choice("view", "create", "str_replace", "insert", "undo_edit"),
            **_FILE_FIELDS,
            view_range=_LINES,
        ),
    ),
    "memory": (
        "Keep notes in files below /memories, which stay between conversations.",
        _object(
            ("command",),
            command=_choice("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILE_FIELDS,
            old_path=_text("rename: present path."),
            new_path=_text("rename: new path."),
            view_range=_LINES,
        ),
    ),
}
"""Description and input schema by type, without its date."""
