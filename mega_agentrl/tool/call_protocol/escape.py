"""Escapes tool output, so that it holds no control tag, chat marker or special token.

Tool output is untrusted. The first character of whatever could be read as a tag or tokenized as a
special token is written as an entity (`<` as `&lt;`, any other as `&#N;`), so that a page cannot
end the episode, fake a call or earn a reward. Three kinds are escaped:

* `<name ...>` and `</name>` for known names, also with spaces, attributes or a missing end, which
  the text behind the output could complete; `[INST]` and similar;
* `<|` and its full-width form, whatever follows;
* the exact texts of the tokenizer's special tokens, whatever their shape.

The match ignores case, full-width forms and invisible characters. All other text is unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTROL_TAGS = (
    *("think", "answer", "search", "python", "result", "reasoning"),
    *("tool", "tools", "tool_call", "tool_calls", "tool_response", "tool_result"),
    *("function", "function_call", "function_calls", "code", "observation", "information"),
    *("s", "bos", "eos", "pad", "unk", "mask", "start_of_turn", "end_of_turn"),
    *("sys", "system", "user", "assistant", "im_start", "im_end"),
)
"""Names that steer an agent or a chat template, as `<name>` or `</name>`."""

BRACKET_TAGS = ("inst", "sys", "tool_calls", "tool_results", "available_tools")
"""Names that steer a chat template as `[name]` or `[/name]`."""

_ASCII_TEXT = re.compile(r"[\t\n\r\x20-\x7e]*")
_INVISIBLE_CATEGORIES = ("Cf", "Cc")
_MIN_TOKEN_CHARS = 3


class ControlTagEscaper:
    """Escapes texts; escaping twice changes nothing more.

    Args:
        names: further tag names, such as those of the tools.
        control_tokens: texts of added tokens; plain words, texts of fewer than 3 characters and
            white space are ordinary text and ignored.
    """

    def __init__(self, names: Iterable[str], control_tokens: Iterable[str] = ()) -> None:
        self._pattern = _compile_pattern(names, control_tokens)

    def __call__(self, text: str) -> str:
        """Return the text with the first character of everything dangerous as an entity."""
        if _ASCII_TEXT.fullmatch(text):
            return self._pattern.sub(lambda match: _html_entity(match[0]), text)
        normalized, positions = _normalize_with_positions(text)
        pieces: list[str] = []
        end = 0
        for match in self._pattern.finditer(normalized):
            position = positions[match.start()]
            if position < end:
                continue
            pieces += (text[end:position], _html_entity(normalized[match.start()]))
            end = position + 1
        return "".join((*pieces, text[end:]))


def is_control_token(token: str) -> bool:
    """Return whether the text of an added token is a marker rather than ordinary text."""
    return (
        len(token) >= _MIN_TOKEN_CHARS
        and not token.isspace()
        and not token.isalnum()
        and not token[0].isalnum()
    )


def _compile_pattern(names: Iterable[str], control_tokens: Iterable[str]) -> re.Pattern[str]:
    tags = "|".join(sorted(re.escape(name) for name in {*CONTROL_TAGS, *names}))
    bracketed = "|".join(BRACKET_TAGS)
    gap = r"\s*+(?:/\s*+)?"  # possessive: linear time on a page of blanks
    patterns = [
        rf"<(?={gap}(?:(?:{tags})(?:[\s/>]|$)|[|\uff5c]))",
        rf"\[(?={gap}(?:{bracketed})\s*+\])",
    ]
    # Only the first character is matched, so that a marker inside another is found as well.
    texts = sorted(
        {_normalize_with_positions(token)[0] for token in control_tokens if is_control_token(token)}
    )
    patterns += [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in texts if token]
    return re.compile("|".join(patterns), re.IGNORECASE)


def _normalize_with_positions(text: str) -> tuple[str, list[int]]:
    """Return the text in NFKC without invisible characters, and each character's source index."""
    normalized: list[str] = []
    positions: list[int] = []
    for position, char in enumerate(text):
        if unicodedata.category(char) in _INVISIBLE_CATEGORIES and char not in "\t\n\r":
            continue
        plain = unicodedata.normalize("NFKC", char)
        normalized.append(plain)
        positions += [position] * len(plain)
    return "".join(normalized), positions


def _html_entity(char: str) -> str:
    return "&lt;" if char == "<" else f"&#{ord(char)};"
