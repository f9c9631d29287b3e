"""Makes tool output harmless: no control tag, no chat marker, no text of a control token.

Tool output is untrusted. What could read as a tag or be tokenized as one gets its first
character written as an entity (`<` as `&lt;`, any other as `&#N;`), so that a page cannot end
the episode, fake a call or earn a reward. Three kinds are escaped:

* `<name ...>` and `</name>` for known names, also with spaces, attributes or a missing end,
  which the text behind the answer could complete; `[INST]` and its relatives;
* `<|` and its full-width relative, with anything behind;
* the very texts that the model's tokenizer has tokens of its own for, whatever their shape.

Looked at as a careless reader would: upper and lower case alike, full-width characters as
plain ones, invisible characters as not there. All other text stays as it is.
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
"""The same in square brackets."""

_PLAIN = re.compile(r"[\t\n\r\x20-\x7e]*")
_INVISIBLE = ("Cf", "Cc")
_MIN_TOKEN_CHARS = 3


class ControlEscape:
    """Escapes one text after the other; escaping twice changes nothing more.

    names: further tag names, those of the tools. control_tokens: texts of tokens; those of a
    word, of fewer than 3 characters or with white space alone are ordinary text and left out.
    """

    def __init__(self, names: Iterable[str], control_tokens: Iterable[str] = ()) -> None:
        self._pattern = _pattern(names, control_tokens)

    def __call__(self, text: str) -> str:
        """The text with the first character of everything dangerous as an entity."""
        if _PLAIN.fullmatch(text):
            return self._pattern.sub(lambda found: _entity(found[0]), text)
        seen, places = _fold(text)
        pieces: list[str] = []
        done = 0
        for found in self._pattern.finditer(seen):
            place = places[found.start()]
            if place < done:
                continue
            pieces += (text[done:place], _entity(seen[found.start()]))
            done = place + 1
        return "".join((*pieces, text[done:]))


def is_control_text(token: str) -> bool:
    """Whether the text of an added token is a marker rather than ordinary text."""
    return (
        len(token) >= _MIN_TOKEN_CHARS
        and not token.isspace()
        and not token.isalnum()
        and not token[0].isalnum()
    )


def _pattern(names: Iterable[str], control_tokens: Iterable[str]) -> re.Pattern[str]:
    known = "|".join(sorted(re.escape(name) for name in {*CONTROL_TAGS, *names}))
    bracketed = "|".join(BRACKET_TAGS)
    gap = r"\s*+(?:/\s*+)?"  # possessive: a page of blanks costs no more than its length
    kinds = [
        rf"<(?={gap}(?:(?:{known})(?:[\s/>]|$)|[|\uff5c]))",
        rf"\[(?={gap}(?:{bracketed})\s*+\])",
    ]
    # Only the first character is matched, so that a marker inside another is seen as well.
    folded = sorted({_fold(token)[0] for token in control_tokens if is_control_text(token)})
    kinds += [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in folded if token]
    return re.compile("|".join(kinds), re.IGNORECASE)


def _fold(text: str) -> tuple[str, list[int]]:
    """The text as a careless reader sees it, and where each of its characters comes from."""
    seen: list[str] = []
    places: list[int] = []
    for place, char in enumerate(text):
        if unicodedata.category(char) in _INVISIBLE and char not in "\t\n\r":
            continue
        plain = unicodedata.normalize("NFKC", char)
        seen.append(plain)
        places += [place] * len(plain)
    return "".join(seen), places


def _entity(char: str) -> str:
    return "&lt;" if char == "<" else f"&#{ord(char)};"
