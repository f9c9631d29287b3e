"""Escape text for the report page: HTML, and JSON that is safe in a script tag.

Text of a policy or a tool is hostile: it may contain tags, the end of a script, control characters
and lone surrogates. HTML built here never executes it. JSON built here is ASCII without `<`, `>`
and `&`; values that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``,
which JavaScript's `Number` parses.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# HTML cannot represent most control characters, UTF-8 no lone surrogates.
_CONTROL_CHAR_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32))}
_CONTROL_CHAR_ESCAPES |= {code: f"\\x{code:02x}" for code in range(127, 160)}
_CONTROL_CHAR_ESCAPES |= {code: "\ufffd" for code in range(0xD800, 0xE000)}
# Bidirectional control characters would reorder the surrounding text.
_CONTROL_CHAR_ESCAPES |= {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_SCRIPT_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


class SafeHtml(str):
    """HTML that is already escaped."""

    __slots__ = ()


def escape_text(value: object) -> SafeHtml:
    """Escape text as HTML; `SafeHtml` is returned unchanged."""
    if isinstance(value, SafeHtml):
        return value
    return SafeHtml(html.escape(str(value).translate(_CONTROL_CHAR_ESCAPES), quote=True))


def html_element(name: str, *children: object, **attributes: object) -> SafeHtml:
    """Build an element; attributes `class_` and `data_x` become `class` and `data-x`.

    Attributes with the value None or False are omitted; True gives an attribute without a value.
    """
    joined = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID_ELEMENTS:
        return SafeHtml(f"<{name}{joined}>")
    inner = "".join(escape_text(child) for child in children)
    return SafeHtml(f"<{name}{joined}>{inner}</{name}>")


_VOID_ELEMENTS = frozenset({"br", "hr", "img", "input", "meta"})


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape_text(value)}"'


def concat_html(parts: Sequence[object]) -> SafeHtml:
    """Concatenate parts, escaping those that are not `SafeHtml`."""
    return SafeHtml("".join(escape_text(part) for part in parts))


def json_for_script(value: Any) -> str:
    """Serialize a value as ASCII JSON that is safe in a script tag."""
    dumped = json.dumps(replace_non_finite(value, _as_text), separators=(",", ":"), allow_nan=False)
    return dumped.translate(_SCRIPT_ESCAPES)


def json_script_element(name: str, value: Any) -> SafeHtml:
    """Build a script tag with JSON data, which is not executed."""
    opening = f'<script type="application/json" id="{escape_text(name)}">'
    return SafeHtml(f"{opening}{json_for_script(value)}</script>")


def replace_non_finite(value: Any, replacement: Callable[[float], Any]) -> Any:
    """Return plain values for JSON, with every number that JSON cannot represent replaced."""
    if isinstance(value, float) and not math.isfinite(value):
        return replacement(value)
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item, replacement) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [replace_non_finite(item, replacement) for item in value]
    return value


def _as_text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
