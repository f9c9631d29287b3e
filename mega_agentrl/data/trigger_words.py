"""Which tokens ARES counts windows behind, where a list of words says so (`algo.ares.words`).

The list is a text file with a word a line; empty lines do not count. A token is a trigger where
its text by itself, without its mark of a leading space, in lower case (`algo.hwe.trigger_word`),
is one of the words. So a word that no single token spells never triggers, as published. Decoding
the vocabulary once replaces decoding the most probable token at every position.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.algo.hwe import trigger_word

if TYPE_CHECKING:
    from collections.abc import Collection

    from mega_agentrl.types.ports import TextCodec


def load_words(path: str) -> frozenset[str]:
    """The words of a file, normalised as tokens are; raises `ValueError` where there are none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"algo.ares.words={path!r}: it cannot be read ({error}); expected a text file with a "
            "word a line; probable cause: a mistyped path"
        ) from error
    words = frozenset(filter(None, map(trigger_word, text.splitlines())))
    if not words:
        raise ValueError(
            f"algo.ares.words={path!r}: got 0 words, expected a word a line; probable cause: an "
            "empty file. Every token is a trigger where algo.ares.words is empty itself"
        )
    return words


def trigger_ids(codec: TextCodec, words: Collection[str], *, key: str) -> frozenset[int]:
    """Ids of the tokens that are one of the words; `ValueError` where none is.

    key: what the words come from, for the error. Decodes the whole vocabulary.
    """
    found = frozenset(
        token_id
        for token_id in range(codec.vocab_size)
        if trigger_word(codec.decode([token_id])) in words
    )
    if not found:
        raise ValueError(
            f"{key}: none of its {len(words)} words is a token of the model's vocabulary, "
            "expected at least one, or no window is ever counted; probable cause: words of "
            "another language, or a line that holds several"
        )
    return found
