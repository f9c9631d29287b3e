r"""Reads answers that consist of several values, and relations.

| kind | examples |
| --- | --- |
| `list` | `1, 2`   `x=1, y=2` |
| `all` | `1 and 2`   `x > 1 and x < 2` |
| `alternatives` | `1 or 2`   `x=1 or x=2`   `\pm 2`   `3 \pm \sqrt{2}` |
| `set` | `\{1, 2\}`   `\emptyset` |
| `()` `[]` `(]` `[)` `<>` | `(1, 2)`   `[0, \infty)`   `\langle 1, 2 \rangle` |
| `union` | `(0, 1) \cup (2, 3)` |
| `matrix` | `\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}`: the rows, as tuples |
| `relation` | `x < 2`   `1 \le x < 3`   `y = 2x + 1`   `x \in [0, 1]` |

`(1, 2)` may be a point or an open interval; both are written alike and compare alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mega_agentrl.reward.matching.notation import (
    SET_CLOSE,
    SET_OPEN,
    matching_bracket,
    split_top_level,
)

MAX_ITEMS = 64
"""Number of items of the largest structure that is compared item by item."""

_OR = re.compile(r",? ?(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:vee|lor)(?![a-zA-Z])")
_AND = re.compile(r",? ?(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:wedge|land)(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\{([pb]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_COMPARISON = re.compile(r"<=|>=|!=|<|>|=|\\in(?![a-zA-Z])")
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_SYMBOL = r"\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?"
_ASSIGNED = re.compile(rf"{_SYMBOL}(?:\({_SYMBOL}(?:,{_SYMBOL})*\))?|\({_SYMBOL}(?:,{_SYMBOL})+\)")
_VARIABLE = re.compile(_SYMBOL)
_ANGLE = re.compile(r"\\langle ?(.*?) ?\\rangle", re.DOTALL)
_PLUS_MINUS = "\\pm"


@dataclass(frozen=True, slots=True)
class Structure:
    """An answer of several values, each a normalized text."""

    kind: str
    items: tuple[str, ...]
    operators: tuple[str, ...] = ()
    """Operators between the items of a relation; those of an order point to the larger one."""

    @property
    def is_unordered(self) -> bool:
        """Whether the order of the items has no meaning."""
        return self.kind in ("set", "all", "alternatives", "union")


def parse_structure(text: str) -> Structure | None:
    """Return the structure that a normalized text is, None for a single value."""
    if text in ("\\emptyset", SET_OPEN + SET_CLOSE):
        return Structure("set", ())
    if match := _MATRIX.fullmatch(text):
        rows = [row.strip() for row in match[2].strip().split("\n")]
        return Structure("matrix", tuple(f"({row.replace('&', ',')})" for row in rows if row))
    structure = _parse_separated(text) or _parse_brackets(text) or _parse_relation(text)
    return structure or _parse_plus_minus(text)


def split_assignment(text: str) -> tuple[str, str]:
    """Return variable and value of `x = 5` or `f(x) = 2x`; an empty variable for other texts."""
    relation = _parse_relation(text)
    if relation is None or relation.operators != ("=",):
        return "", text
    name, value = relation.items
    return (name, value) if _ASSIGNED.fullmatch(name) and name != value else ("", text)


def to_interval(relation: Structure) -> str:
    """Return the interval of `1 < x <= 3`, `x > 2` or `x in [0, 1]`, empty for other relations."""
    items, operators = relation.items, relation.operators
    if operators == ("\\in",):
        return items[1] if _VARIABLE.fullmatch(items[0]) else ""
    if any(operator not in ("<", "<=") for operator in operators):
        return ""
    if len(items) == 2:
        low, high = (
            ("-\\infty", *items[1:]) if _VARIABLE.fullmatch(items[0]) else (items[0], "\\infty")
        )
        if not any(map(_VARIABLE.fullmatch, items)) or all(map(_VARIABLE.fullmatch, items)):
            return ""
        is_upper = _VARIABLE.fullmatch(items[0]) is not None
        left = "(" if is_upper or operators == ("<",) else "["
        right = ")" if not is_upper or operators == ("<",) else "]"
        return f"{left}{low},{high}{right}"
    if len(items) == 3 and _VARIABLE.fullmatch(items[1]):
        left = "(" if operators[0] == "<" else "["
        right = ")" if operators[1] == "<" else "]"
        return f"{left}{items[0]},{items[2]}{right}"
    return ""


def _parse_separated(text: str) -> Structure | None:
    """Return a union, alternatives or a list, None if the text has no separator."""
    parts = _split_at(text, re.compile(r"\\cup(?![a-zA-Z])"))
    if len(parts) > 1:
        return Structure("union", tuple(parts))
    for kind, word in (("alternatives", _OR), ("all", _AND)):
        parts = _split_at(text, word)
        if len(parts) > 1:
            items = [item for part in parts for item in split_top_level(part, ",;")]
            return Structure(kind, tuple(item for item in items if item))
    parts = split_top_level(text, ",;")
    return Structure("list", tuple(parts)) if len(parts) > 1 and all(parts) else None


def _parse_brackets(text: str) -> Structure | None:
    """Return the tuple, interval or set that fills the whole text."""
    if match := _ANGLE.fullmatch(text):
        return Structure("<>", tuple(split_top_level(match[1], ",")))
    if len(text) < 2 or text[0] not in f"([{SET_OPEN}" or matching_bracket(text) != len(text) - 1:
        return None
    items = tuple(split_top_level(text[1:-1], ",;"))
    if text[0] == SET_OPEN:
        return Structure("set", items)
    return Structure(f"{text[0]}{text[-1]}", items) if len(items) > 1 else None


def _parse_relation(text: str) -> Structure | None:
    """Return a relation whose operators of an order all point to the larger side."""
    parts, operators = [], []
    start = 0
    for match in _COMPARISON.finditer(text):
        if _is_top_level(text, match.start()):
            parts.append(text[start : match.start()].strip())
            operators.append(match[0])
            start = match.end()
    parts.append(text[start:].strip())
    if not operators or not all(parts):
        return None
    if any(operator in (">", ">=") for operator in operators):
        parts, operators = parts[::-1], [_FLIPPED.get(name, name) for name in operators[::-1]]
    return Structure("relation", tuple(parts), tuple(operators))


def _parse_plus_minus(text: str) -> Structure | None:
    if text.count(_PLUS_MINUS) != 1:
        return None
    before, _, after = text.partition(_PLUS_MINUS)
    after = after.strip()
    if not after:
        return None
    return Structure(
        "alternatives", (f"{before}+{after}" if before else after, f"{before}-{after}")
    )


def _split_at(text: str, separator: re.Pattern[str]) -> list[str]:
    parts, start = [], 0
    for match in separator.finditer(text):
        if _is_top_level(text, match.start()):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _is_top_level(text: str, position: int) -> bool:
    opened = sum(text.count(char, 0, position) for char in "([{⦃")
    return opened == sum(text.count(char, 0, position) for char in ")]}⦄")
