"""The file editor of a workspace: views a range of lines, creates a file, replaces a text.

It runs with the rights of the policy's code, in the workspace. Relative paths start at
`/workspace`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1 << 24


class EditError(ValueError):
    """The request cannot be done; the policy sees the message."""


def run_edit(request_json: str) -> str:
    """Carry out a request, whose fields the tool has checked, and return the answer.

    Args:
        request_json: Object with `command` (`view`, `create` or `replace`) and `path`; `view` may
            have `first_line` and `last_line`, `create` has `text`, `replace` has `old` and `new`.

    Raises:
        EditError: The file or the text to replace does not fit.
    """
    request: dict[str, Any] = json.loads(request_json)
    path = Path(request["path"])
    try:
        if request["command"] == "create":
            return _create(path, request["text"])
        text = _read(path)
        if request["command"] == "replace":
            return _replace(path, text, request["old"], request["new"])
        first, last = request.get("first_line"), request.get("last_line")
        return _view(text, int(first or 1), None if last is None else int(last))
    except OSError as error:
        raise EditError(f"{path}: {error.strerror}") from error


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise EditError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise EditError(f"{path}: not a text file in UTF-8") from None


def _create(path: Path, text: str) -> str:
    verb = "Overwrote" if path.exists() else "Created"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return f"{verb} {path}, {_count(text)} lines."


def _view(text: str, first: int, last: int | None) -> str:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    last = len(lines) if last is None else min(last, len(lines))
    if lines and not 1 <= first <= last:
        raise EditError(f"lines {first} to {last}: the file has {len(lines)} lines")
    shown = enumerate(lines[first - 1 : last], start=first)
    return "\n".join(f"{number:6}\t{line}" for number, line in shown) or "The file is empty."


def _replace(path: Path, text: str, old: str, new: str) -> str:
    count = text.count(old)
    if count != 1:
        raise EditError(f"{path}: the text to replace occurs {count} times, expected exactly once")
    changed = text.replace(old, new)
    # Written in place, so that the file keeps its mode and its hard links.
    with path.open("r+b") as file:
        file.write(changed.encode())
        file.truncate()
    start = text[: text.index(old)].count("\n") + 1
    around = _view(changed, max(1, start - 2), start + new.count("\n") + 2)
    return f"Replaced in {path}:\n{around}"


def _count(text: str) -> int:
    return text.count("\n") + (bool(text) and not text.endswith("\n"))
