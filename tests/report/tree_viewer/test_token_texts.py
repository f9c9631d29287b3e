"""Texts of single tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.tree_viewer.token_texts import TokenTexts


def from_bytes(token_ids):
    """A decoder whose tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def without_first_space(token_ids):
    """A decoder that drops the space in front of everything, as some do."""
    words = {1: "▁the", 2: "▁cat", 3: "s", 4: "▁"}
    return "".join(words[token] for token in token_ids).replace("▁", " ").removeprefix(" ")


def test_a_character_of_several_tokens_is_with_the_last():
    assert TokenTexts(from_bytes).split("aé漢!".encode()) == ["a", "", "é", "", "", "漢", "!"]


def test_half_a_character_at_the_end_is_shown_broken():
    assert TokenTexts(from_bytes).split("a漢".encode()[:-1]) == ["a", "", "\ufffd"]


def test_spaces_are_kept():
    pieces = TokenTexts(without_first_space)
    assert pieces.split([1, 2, 3, 1]) == ["the", " cat", "s", " the"]
    assert pieces.split([]) == []


def test_bytes_that_are_no_text_do_not_stall():
    pieces = TokenTexts(from_bytes).split([0xFF] * 20 + [65])
    assert len(pieces) == 21 and pieces[-1].endswith("A")


@given(st.text(max_size=30))
def test_the_pieces_are_the_text(words):
    token_ids = words.encode("utf-8", "ignore")
    pieces = TokenTexts(from_bytes).split(token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == from_bytes(token_ids)
