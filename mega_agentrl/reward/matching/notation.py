r"""Rewrites an answer in one notation, so that equal texts of different spelling become equal.

`normalize` removes what carries no meaning (maths delimiters, spacing commands, `\text`, `\left`,
outer braces, emphasis, a final full stop) and gives each symbol one spelling:

    ½  \dfrac12  \tfrac{1}{2}   \frac{1}{2}        ×  \times  \cdot  *     *
    ≤  \le  \leqslant           <=                 ∪  \cup                 \cup
    90^\circ  90 \degree        90°                \{1, 2\}                ⦃1,2⦄
    α                           \alpha             x²                      x^2

Spaces remain only between letters and digits, where they may matter (`3 1/2`, `5 cm`).
"""

# ruff: noqa: RUF001, RUF002  characters that look alike are what this module is about

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_CHARS = 2000
"""Length of the longest text that is rewritten; longer texts are equal only to themselves."""

SET_OPEN, SET_CLOSE = "⦃", "⦄"
CURRENCY = "＄"
"""A dollar sign that is money, not a maths delimiter."""

_SYMBOLS = {
    "−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "﹣": "-", "⁄": "/", "∕": "/", "÷": "/",
    "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "√": r"\sqrt ", "∞": r"\infty ",
    "≤": "<=", "≦": "<=", "⩽": "<=", "≥": ">=", "≧": ">=", "⩾": ">=", "≠": "!=", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": "°", "º": "°", "˚": "°",
    "⟨": r"\langle ", "⟩": r"\rangle ", "，": ",", "、": ",", "。": ".", "“": '"', "”": '"',
    "‘": "'", "’": "'", "′": "'", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "∑": r"\sum ", "∫": r"\int ", "∏": r"\prod ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "\u200b": "",
    "\u2062": "", "\u2061": "", "\u200e": "", "\ufeff": "", "﹪": "%", "％": "%", "＄": CURRENCY,
}  # fmt: skip
_COMMANDS = {
    "times": "*", "cdot": "*", "ast": "*", "bullet": "*", "div": "/", "le": "<=", "leq": "<=",
    "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=",
    "lt": "<", "gt": ">", "dfrac": r"\frac ", "tfrac": r"\frac ", "cfrac": r"\frac ",
    "dbinom": r"\binom ", "tbinom": r"\binom ", "lbrace": SET_OPEN, "rbrace": SET_CLOSE,
    "varnothing": r"\emptyset ", "degree": "°", "degrees": "°", "percent": "%", "lvert": "|",
    "rvert": "|", "vert": "|", "mid": "|", "colon": ":", "dots": "...", "ldots": "...",
    "cdots": "...", "pounds": "£", "euro": "€", "lbrack": "[", "rbrack": "]", "displaystyle": " ",
    "textstyle": " ", "limits": "", "quad": " ", "qquad": " ", "left": "", "right": "", "big": "",
    "Big": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "bigg": "", "Bigg": "",
    "biggl": "", "biggr": "", "boldsymbol": "", "bm": "", "mathbf": "", "mathrm": "", "mathit": "",
    "rm": "", "bf": "", "it": "", "notag": "", "nobreak": "", "nolimits": "",
    "bigcup": r"\cup ", "iff": r"\iff ", "infin": r"\infty ",
}  # fmt: skip
_TEXT_COMMAND = re.compile(
    r"\\(text|textbf|textit|textrm|textnormal|mbox|hbox|mathrm|mathbf|mathit|mathsf|emph|boxed"
    r"|fbox|operatorname\*?)\s*\{([^{}]*)\}"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SPACING = re.compile(r"\\[,;: ]|(?<!\\)~|\\!")
_DELIMITER = re.compile(r"\\[()\[\]]|\$\$")
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_SUBSCRIPT = re.compile(f"[{_SUBSCRIPTS}]+")
_VULGAR_FRACTION = re.compile(r"(\d?)\s*([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒])")
_FRACTION_ARGUMENT = r"(?:\{([^{}]*)\}|([0-9a-zA-Z]))"
_FRACTION = re.compile(rf"\\(frac|binom)\s*{_FRACTION_ARGUMENT}\s*{_FRACTION_ARGUMENT}")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")
_INFINITY = re.compile(r"\\infty(?![a-zA-Z])|(?<![a-zA-Z\\])(?:infinity|infty|inf)(?![a-zA-Z])")
_SPACE_BESIDE_SYMBOL = re.compile(r"[^\S\n]*([^\w\s\\])[^\S\n]*|[^\S\n]+(?=\\)")
_MAX_NESTING = 8


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    """Return the text in one notation; a text that is too long is only stripped."""
    if len(text) > MAX_CHARS:
        return text.strip()
    text = _replace_unicode(_unwrap_emphasis(text.strip()))
    text = text.replace(r"\%", "%").replace(r"\$", CURRENCY).replace("{,}", ",")
    text = text.replace(r"\{", SET_OPEN).replace(r"\}", SET_CLOSE)
    text = re.sub(r"\\\\", "\n", text) if r"\begin" in text else text.replace("\\\\", "\\")
    text = _SPACING.sub(lambda match: "" if match[0] == r"\!" else " ", text)
    text = _remove_dollars(_DELIMITER.sub(" ", text))
    for _ in range(_MAX_NESTING):
        text, num_changes = _TEXT_COMMAND.subn(r" \2 ", text)
        if not num_changes:
            break
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = re.sub(r"\^\s*(?:\{\s*)?\\circ\s*\}?", "°", text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _FRACTION.sub(_brace_fraction, text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\*\*", "^", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"\s*\n\s*", "\n", text) if r"\begin" in text else text
    spaced = re.sub(r"[^\S\n]+", " ", text)
    text = _SPACE_BESIDE_SYMBOL.sub(lambda match: match[1] or "", spaced)
    text = text.replace("+-", r"\pm ") if text.startswith("+-") else text.replace("+/-", r"\pm ")
    text = text.strip()
    return _unwrap_braces(text if text.endswith("...") else text.rstrip(".,;").strip())


def matching_bracket(text: str, start: int = 0) -> int:
    """Return the position of the bracket that closes the one at `start`, -1 if there is none.

    Round and square brackets count as one kind, so that half-open intervals are balanced.
    """
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "([{⦃":
            depth += 1
        elif text[position] in ")]}⦄":
            depth -= 1
            if depth <= 0:
                return position if depth == 0 else -1
    return -1


def split_top_level(text: str, separators: str) -> list[str]:
    """Split a text at the separator characters that are outside of all brackets."""
    parts, start, depth = [], 0, 0
    for position, char in enumerate(text):
        if char in "([{⦃":
            depth += 1
        elif char in ")]}⦄":
            depth -= 1
        elif char in separators and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _replace_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _VULGAR_FRACTION.sub(
        lambda match: (
            match[1] + (" " if match[1] else "") + unicodedata.normalize("NFKC", match[2])
        ),
        text,
    )
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    return "".join(map(_replace_char, text))


@lru_cache(maxsize=4096)
def _replace_char(char: str) -> str:
    if char.isascii():
        return char
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    if char.isspace():
        return " "
    plain = unicodedata.normalize("NFKC", char)
    kind, _, letter = unicodedata.name(plain, "").rpartition(" ") if len(plain) == 1 else ("",) * 3
    if kind in ("GREEK SMALL LETTER", "GREEK CAPITAL LETTER"):
        letter = "lambda" if letter == "LAMDA" else letter.lower()
        return f"\\{letter.capitalize() if 'CAPITAL' in kind else letter} "
    return _SYMBOLS.get(plain, plain)


def _unwrap_emphasis(text: str) -> str:
    """Remove quotes, backticks and Markdown's asterisks around the whole text."""
    for _ in range(_MAX_NESTING):
        for mark in ("**", "__", "`", '"', "'", "*", "_"):
            inner = text[len(mark) : -len(mark)]
            is_wrapped = text.startswith(mark) and text.endswith(mark)
            if is_wrapped and len(text) > 2 * len(mark) and mark not in inner:
                text = inner.strip()
                break
        else:
            return text.removeprefix("**").strip() if text.count("**") == 1 else text
    return text


def _remove_dollars(text: str) -> str:
    """Remove the dollar signs that delimit maths; a single one before a number is money."""
    if text.count("$") == 1 and re.match(r"\s*-?\s*\$\s*-?[\d.]", text):
        return text.replace("$", CURRENCY)
    return text.replace("$", " ")


def _brace_fraction(match: re.Match[str]) -> str:
    command, first, first_char, second, second_char = match.groups()
    top, bottom = (
        (first_char if first is None else first),
        (second_char if second is None else second),
    )
    return f"\\{command}{{{top.strip()}}}{{{bottom.strip()}}}"


def _unwrap_braces(text: str) -> str:
    """Remove braces around the whole text, or read them as those of a set if it lists items."""
    while text.startswith("{") and matching_bracket(text) == len(text) - 1:
        inner = text[1:-1].strip()
        if len(split_top_level(inner, ",")) > 1:
            return f"{SET_OPEN}{inner}{SET_CLOSE}"
        text = inner
    return text
