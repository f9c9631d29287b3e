"""Reads trigger words for ARES's entropy windows and finds their tokens.

`algo.ares.trigger_words_file` is a text file with one word per line, or `default` for
`DEFAULT_WORDS`. These are words after which a chain of thought takes a turn: it doubts, looks for
another way, draws a conclusion, compares, supposes or checks. The published code's list of 174
words is not part of this package; a file with them reproduces it. A token is a trigger if its
text alone, in lower case and without the mark of a leading space (`normalize_trigger_token`), is
one of the words. As published, a word of several tokens never triggers. The vocabulary is decoded
once, instead of the most probable token at every position.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.algo.ares.entropy_windows import normalize_trigger_token
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.config.sections.algo import DEFAULT_TRIGGER_WORDS
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection

    from mega_agentrl.types.protocols import TextCodec


DEFAULT_WORDS = frozenset(
    (
        # Doubt and correction.
        "wait hmm hm oops actually no not but however though although unless maybe perhaps "
        "possibly probably unsure uncertain wrong mistake error incorrect "
        # Alternatives.
        "alternatively alternative instead otherwise another else or rather either "
        # Conclusion.
        "so thus therefore hence consequently then because since as given means implies follows "
        "conclude finally overall "
        # Comparison.
        "while whereas similarly likewise unlike same different compare versus "
        # Supposition.
        "if suppose assume assuming consider imagine let case when "
        # Check and plan.
        "check verify recheck confirm test first second third next now again back recall remember "
        "note notice need try should could would why how what which where"
    ).split()
)


def load_trigger_words(path: str) -> frozenset[str]:
    """Return the normalised words of a file, or `DEFAULT_WORDS`.

    Raises:
        ConfigError: The file cannot be read or has no words.
    """
    if path == DEFAULT_TRIGGER_WORDS:
        return DEFAULT_WORDS
    key, expected = "algo.ares.trigger_words_file", "a text file with one word per line"
    with reading(key, path, expected):
        text = Path(path).read_text(encoding="utf-8")
    words = frozenset(filter(None, map(normalize_trigger_token, text.splitlines())))
    if not words:
        expected += "; leave the setting empty to make every token a trigger"
        raise ConfigError(key, path, expected, "the file has no words")
    return words


def trigger_token_ids(codec: TextCodec, words: Collection[str], *, key: str) -> frozenset[int]:
    """Return the ids of all tokens of the vocabulary that are one of the normalised words.

    Raises:
        InputError: no token is one of the words, which the configuration key `key` sets.
    """
    token_ids = frozenset(
        token_id
        for token_id in range(codec.vocab_size)
        if normalize_trigger_token(codec.decode([token_id])) in words
    )
    if not token_ids:
        raise InputError(
            key,
            sorted(words),
            "at least one word that is a token of the model's vocabulary, because no window is "
            "counted otherwise",
            "words of another language, or several words on a line",
        )
    return token_ids
