"""Render the templates of the report page, and JSON that is safe in a script tag.

Text of a policy or a tool is untrusted: it may contain tags, the end of a script, control
characters and lone surrogates. The templates (Jinja, in `assets/`) escape every value that is not
`Markup`. JSON built here is ASCII without `<`, `>` and `&`; values that are not finite are the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which JavaScript's `Number` parses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mega_agentrl.report.page.axes import format_number

# HTML cannot represent most control characters, UTF-8 no lone surrogates.
_CONTROL_CHAR_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32))}
_CONTROL_CHAR_ESCAPES |= {code: f"\\x{code:02x}" for code in range(127, 160)}
_CONTROL_CHAR_ESCAPES |= {code: "\ufffd" for code in range(0xD800, 0xE000)}
# Bidirectional control characters would reorder the surrounding text.
_CONTROL_CHAR_ESCAPES |= {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_SCRIPT_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


@cache
def template_environment() -> Environment:
    """Return the environment of the templates; the filter `number` is `format_number`."""
    environment = Environment(
        loader=PackageLoader("mega_agentrl.report", "assets"),
        autoescape=True,
        finalize=_show_control_chars,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = format_number
    return environment


def render_template(name: str, **values: object) -> Markup:
    """Render a file of `assets/`."""
    return Markup(template_environment().get_template(name).render(values))


def _show_control_chars(value: object) -> str:
    """Replace control characters in the value of an expression, before it is escaped."""
    return value if isinstance(value, Markup) else str(value).translate(_CONTROL_CHAR_ESCAPES)


def json_for_script(value: Any) -> str:
    """Serialize a value as ASCII JSON that is safe in a script tag."""
    dumped = json.dumps(replace_non_finite(value, _as_text), separators=(",", ":"), allow_nan=False)
    return dumped.translate(_SCRIPT_ESCAPES)


def json_script_element(name: str, json_text: str) -> Markup:
    """Build a script tag, which is not executed, with the result of `json_for_script`."""
    element = Markup('<script type="application/json" id="{}">{}</script>')
    return element.format(name, Markup(json_text))


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
