"""Text on its way into the report page: escaped HTML, and JSON that is safe in a script tag.

What a policy or a tool wrote is hostile: it may hold tags, the end of a script, control
characters and halves of surrogate pairs. HTML made here has no way to run any of it; JSON made
here holds no `<`, `>` and `&`, is pure ASCII, and has numbers that are none as the texts
``"NaN"``, ``"Infinity"``, ``"-Infinity"``, which JavaScript's `Number` reads back.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

# HTML has no form for most control characters, UTF-8 none for half a surrogate pair.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32))}
_VISIBLE |= {code: f"\\x{code:02x}" for code in range(127, 160)}
_VISIBLE |= {code: "\ufffd" for code in range(0xD800, 0xE000)}
# Marks that turn the direction of text around would reorder what stands beside them.
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_IN_SCRIPT = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any text as HTML; `Markup` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).translate(_VISIBLE), quote=True))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; attributes named `class_` or `data_x` lose the underscore's meaning.

    An attribute of None is left out, one of True has no value.
    """
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    inner = "".join(text(child) for child in children)
    return Markup(f"<{name}{shown}>{inner}</{name}>")


_VOID = frozenset({"br", "hr", "img", "input", "meta"})


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(value)}"'


def joined(parts: Sequence[object]) -> Markup:
    """Several pieces after one another."""
    return Markup("".join(text(part) for part in parts))


def script_json(value: Any) -> str:
    """The value as JSON that can stand in a script tag and holds no character outside ASCII."""
    dumped = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return dumped.translate(_IN_SCRIPT)


def data_block(name: str, value: Any) -> Markup:
    """A script tag that holds data and runs nothing."""
    return Markup(
        f'<script type="application/json" id="{text(name)}">{script_json(value)}</script>'
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
