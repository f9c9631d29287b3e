"""Parses JSON that a policy wrote, with bounds on depth and numbers."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
"""Nesting of lists and objects in a call, its own object included; checks and encoders of deeper
ones could run out of stack."""

MAX_LOOP_VALUES = 1000
"""Values of arguments up to which the event loop itself works on them: at 1 to 10 us each less than
10 ms. Usual arguments have fewer than ten."""

_MAX_ENCODINGS = 3


def decode_prefix(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position and the position behind it.

    Line breaks may stand within texts.

    Raises:
        ValueError: there is none, or it holds NaN or a number that no double represents.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.raw_decode(text, start)


def decode(text: str) -> Any:
    """Return the value of a JSON text; raises `ValueError`, also for one that is too deep."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_depth(value)
    return value


def decode_nested(value: Any) -> Any:
    """Return what a text encodes, once or several times, and None for a blank one.

    A value that is no text is returned as it is.

    Raises:
        ValueError: the text is not JSON.
    """
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(value, str):
            break
        value = decode(value) if value.strip() else None
    return value


def check_depth(value: Any) -> None:
    """Raise `ValueError` for lists and objects that are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        level = [
            child
            for item in containers
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def has_many_values(value: Any) -> bool:
    """Return whether a value of JSON has more than `MAX_LOOP_VALUES` values, texts of keys aside.

    Of larger ones it looks at the first only.
    """
    num_values = 1
    stack = [value] if isinstance(value, dict | list) else []
    while stack:
        item = stack.pop()
        children = item.values() if isinstance(item, dict) else item
        num_values += len(children)
        if num_values > MAX_LOOP_VALUES:
            return True
        stack += [child for child in children if isinstance(child, dict | list)]
    return False


def without_surrogates(value: Any) -> Any:
    """Return a value of JSON with `?` for each half of a surrogate pair, which no file can hold."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def parse_float(text: str) -> float:
    """Return the number of a JSON text; raises `ValueError` for one that no double represents."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant, parse_float=parse_float)
