"""Texts cut to a budget of tokens, at word borders, with an ellipsis where something is left out.

`trim` keeps the beginning, `around` the window that holds most of a query's words: words count
by how rare they are in the text, each distinct one once. A budget is in tokens of the policy.
A codec is nothing for several threads, so whatever takes one belongs on the loop's own thread;
`from_window`, which reads the whole text, takes none.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.ports import TextCodec

ELLIPSIS = " ..."

_WORD = re.compile(r"\S+")
_LETTERS = re.compile(r"[^\W_]+")
_CHARS_PER_TOKEN = 16  # more than a real text has: bounds how much is ever encoded at once
_SAMPLE_CHARS = 4000
_ROUGHLY = 64  # tokens of a budget for which a cut may come one character early


def trim(text: str, codec: TextCodec, max_tokens: int) -> str:
    """The beginning of a text in at most `max_tokens`, the ellipsis included."""
    limit = max_tokens * _CHARS_PER_TOKEN
    num_tokens = len(codec.encode(text[:limit]))
    if len(text) <= limit and num_tokens <= max_tokens:
        return text

    def is_short(size: int) -> bool:
        return len(codec.encode(text[:size].rstrip() + ELLIPSIS)) <= max_tokens

    fits, breaks = 0, min(len(text), limit) + 1
    # Near the rate of the whole first: the rest of the search is then over short texts.
    guess = int(1.2 * breaks * max_tokens / max(1, num_tokens))
    while breaks - fits > 1 + max_tokens // _ROUGHLY:
        middle = guess if fits < guess < breaks else (fits + breaks) // 2
        guess = 0
        if is_short(middle):
            fits = middle
        else:
            breaks = middle
    return text[: _word_end(text, fits)].rstrip() + ELLIPSIS


def around(text: str, query: str, codec: TextCodec, max_tokens: int) -> str:
    """The part of a text that says most about a query, in at most `max_tokens`."""
    num_words = words_that_fit(text, codec, max_tokens)
    return trim(from_window(text, query, num_words), codec, max_tokens)


def words_that_fit(text: str, codec: TextCodec, max_tokens: int) -> int:
    """About how many words of a text make `max_tokens` with an ellipsis at both ends."""
    sample = text[:_SAMPLE_CHARS]
    room = max_tokens - 2 * len(codec.encode(ELLIPSIS))
    return max(1, room * len(_WORD.findall(sample)) // max(1, len(codec.encode(sample))))


def from_window(text: str, query: str, num_words: int) -> str:
    """The text from where the best window of `num_words` begins; an ellipsis for the rest."""
    words = list(_WORD.finditer(text))
    wanted = {word.casefold() for word in _LETTERS.findall(query)}
    if not wanted or len(words) <= num_words:
        return text
    hits = [
        [word for word in _LETTERS.findall(match.group().casefold()) if word in wanted]
        for match in words
    ]
    start = _best_start(hits, num_words)
    return f"{ELLIPSIS.strip()} {text[words[start].start() :]}" if start else text


def _best_start(hits: Sequence[Sequence[str]], size: int) -> int:
    """Index of the first word of the best window of `size` words, what it found in its middle."""
    counts = Counter(word for found in hits for word in found)
    weight = {word: 1 / math.sqrt(count) for word, count in counts.items()}
    inside: Counter[str] = Counter()
    score = best_score = 0.0
    best_end = -1
    for end, found in enumerate(hits):
        for word in found:
            score += weight[word] if not inside[word] else 0.0
            inside[word] += 1
        if end >= size:
            for word in hits[end - size]:
                inside[word] -= 1
                score -= weight[word] if not inside[word] else 0.0
        if score > best_score + 1e-9:
            best_score, best_end = score, end
    if best_end < 0:
        return 0
    first = max(0, best_end - size + 1)
    inside_at = [index for index in range(first, best_end + 1) if hits[index]]
    middle = (inside_at[0] + inside_at[-1]) // 2
    return max(0, min(middle - size // 2, inside_at[0]))


def _word_end(text: str, end: int) -> int:
    """The last border of a word up to `end`; `end` itself in a text without spaces."""
    if end >= len(text) or text[end].isspace():
        return end
    start = end
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    return start if start > end // 2 else end
