"""Texts keep to their budget, break between words, and show what was asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.snippet import (
    ELLIPSIS,
    estimate_max_words,
    text_from_best_window,
    truncate_to_tokens,
)
from tests.fakes import CharCodec
from tests.tool.local_server import WordCodec

WORDS, CHARS = WordCodec(), CharCodec()


def extract_snippet(text, query, codec, max_tokens):
    """As the browse tool does it, in one thread."""
    num_words = estimate_max_words(text, codec, max_tokens)
    return truncate_to_tokens(text_from_best_window(text, query, num_words), codec, max_tokens)


@pytest.mark.parametrize(
    ("codec", "text", "budget", "shown"),
    [
        (WORDS, "one two three", 3, "one two three"),
        (WORDS, "one two three four", 3, "one two ..."),
        (WORDS, "one two  three four", 4, "one two  three four"),
        (WORDS, "", 1, ""),
        (CHARS, "hello world", 11, "hello world"),
        (CHARS, "hello world", 10, "hello ..."),
        (CHARS, "hello worlds and more", 15, "hello ..."),
        (CHARS, "hello worlds and more", 16, "hello worlds ..."),
        (CHARS, "abcdefghijkl", 10, "abcdef ..."),
        (CHARS, "天地玄黄宇宙洪荒日月盈昃", 8, "天地玄黄 ..."),
        (CHARS, "a bcdefghijklmnop", 10, "a bcde ..."),
    ],
)
def test_a_long_text_is_cut_between_words(codec, text, budget, shown):
    assert truncate_to_tokens(text, codec, budget) == shown


@given(st.text(max_size=80), st.integers(4, 90), st.sampled_from([WORDS, CHARS]))
def test_a_cut_text_fits_the_budget_and_is_a_prefix(text, budget, codec):
    shown = truncate_to_tokens(text, codec, budget)
    assert len(codec.encode(shown)) <= budget
    if len(codec.encode(text)) <= budget:
        assert shown == text
    else:
        assert shown.endswith(ELLIPSIS)
        assert text.startswith(shown.removesuffix(ELLIPSIS))


def page(**words):
    """w0 w1 ... w999, where `_7="x"` writes x in the place of w7."""
    return " ".join(words.get(f"_{number}", f"w{number}") for number in range(1000))


def test_the_window_has_the_words_of_the_query_in_its_middle():
    shown = extract_snippet(page(_700="Needle,", _705="(hay)"), "needle HAY", WORDS, 21)
    words = shown.split()
    assert len(words) == 21
    assert (words[0], words[-1]) == ("...", "...")
    assert {"Needle,", "(hay)"} <= set(words)
    assert words[words.index("Needle,") - 5] == "w695"


def test_more_distinct_and_rarer_words_count_more():
    text = page(_100="the", _101="the", _102="the", _500="the", _501="needle", _800="the")
    assert "needle" in extract_snippet(text, "the needle", WORDS, 11).split()
    text = page(_100="needle", _500="needle", _502="hay")
    assert "hay" in extract_snippet(text, "needle hay", WORDS, 11).split()


def test_the_window_may_be_at_either_end():
    for query in ("", "absent", "?!"):
        assert extract_snippet(page(), query, WORDS, 4) == "w0 w1 w2 ..."
    assert extract_snippet("w0 w1", "w1", WORDS, 4) == "w0 w1"
    assert "needle" in extract_snippet(page(_999="needle"), "needle", WORDS, 8).split()


@given(
    st.lists(st.sampled_from(["a", "b", "c", "dd", "\n"]), max_size=120),
    st.integers(4, 30),
    st.sampled_from([WORDS, CHARS]),
)
def test_a_window_fits_the_budget(words, budget, codec):
    assert len(codec.encode(extract_snippet(" ".join(words), "a dd", codec, budget))) <= budget


def test_a_huge_text_is_not_encoded_whole():
    class Counting(WordCodec):
        chars = 0

        def encode(self, text):
            self.chars += len(text)
            return super().encode(text)

    codec = Counting()
    text = "some words " * 20_000 + "needle " + "more words " * 5_000
    assert "needle" in extract_snippet(text, "needle", codec, 64)
    assert codec.chars < 50_000
