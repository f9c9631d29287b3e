"""Cuts texts to a token budget at word boundaries, with an ellipsis for what is left out.

`truncate_to_tokens` keeps the beginning; `text_from_best_window` starts at the window with most of
a query's words, where each distinct word counts once, weighted by how rare it is in the text. A
codec is not thread-safe, so functions that take one belong on the event loop's thread;
`text_from_best_window`, which reads the whole text, takes no codec.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.protocols import TextCodec

ELLIPSIS = " ..."

_WORD = re.compile(r"\S+")
_QUERY_WORD = re.compile(r"[^\W_]+")
_MAX_CHARS_PER_TOKEN = 16  # more than in real text; bounds the text encoded at once
_SAMPLE_CHARS = 4000
_TOLERANCE_DIVISOR = 64  # a cut may be 1 + max_tokens / 64 characters early


def truncate_to_tokens(text: str, codec: TextCodec, max_tokens: int) -> str:
    """Return the beginning of a text in at most `max_tokens`, ellipsis included."""
    limit = max_tokens * _MAX_CHARS_PER_TOKEN
    num_tokens = len(codec.encode(text[:limit]))
    if len(text) <= limit and num_tokens <= max_tokens:
        return text

    def is_short(size: int) -> bool:
        return len(codec.encode(text[:size].rstrip() + ELLIPSIS)) <= max_tokens

    low, high = 0, min(len(text), limit) + 1
    # The first guess is from the text's average rate: the bisection then encodes short texts only.
    guess = int(1.2 * high * max_tokens / max(1, num_tokens))
    while high - low > 1 + max_tokens // _TOLERANCE_DIVISOR:
        middle = guess if low < guess < high else (low + high) // 2
        guess = 0
        if is_short(middle):
            low = middle
        else:
            high = middle
    return text[: _word_end(text, low)].rstrip() + ELLIPSIS


def estimate_max_words(text: str, codec: TextCodec, max_tokens: int) -> int:
    """Estimate how many words of a text fit in `max_tokens` with an ellipsis at both ends."""
    sample = text[:_SAMPLE_CHARS]
    room = max_tokens - 2 * len(codec.encode(ELLIPSIS))
    return max(1, room * len(_WORD.findall(sample)) // max(1, len(codec.encode(sample))))


def text_from_best_window(text: str, query: str, num_words: int) -> str:
    """Return the text from its best window of `num_words` words on; an ellipsis marks the cut."""
    words = list(_WORD.finditer(text))
    query_words = {word.casefold() for word in _QUERY_WORD.findall(query)}
    if not query_words or len(words) <= num_words:
        return text
    hits = [
        [word for word in _QUERY_WORD.findall(match.group().casefold()) if word in query_words]
        for match in words
    ]
    start = _best_window_start(hits, num_words)
    return f"{ELLIPSIS.strip()} {text[words[start].start() :]}" if start else text


def _best_window_start(hits: Sequence[Sequence[str]], size: int) -> int:
    """Return the index of the first word of the best window, with the hits in its middle."""
    counts = Counter(word for words in hits for word in words)
    weight = {word: 1 / math.sqrt(count) for word, count in counts.items()}
    counts_in_window: Counter[str] = Counter()
    score = best_score = 0.0
    best_end = -1
    for end, words in enumerate(hits):
        for word in words:
            score += weight[word] if not counts_in_window[word] else 0.0
            counts_in_window[word] += 1
        if end >= size:
            for word in hits[end - size]:
                counts_in_window[word] -= 1
                score -= weight[word] if not counts_in_window[word] else 0.0
        if score > best_score + 1e-9:
            best_score, best_end = score, end
    if best_end < 0:
        return 0
    first = max(0, best_end - size + 1)
    hit_indices = [index for index in range(first, best_end + 1) if hits[index]]
    middle = (hit_indices[0] + hit_indices[-1]) // 2
    return max(0, min(middle - size // 2, hit_indices[0]))


def _word_end(text: str, end: int) -> int:
    """Return the last word boundary up to `end`, or `end` in a text without spaces."""
    if end >= len(text) or text[end].isspace():
        return end
    start = end
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    return start if start > end // 2 else end
