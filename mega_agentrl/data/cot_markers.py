"""Token ids of the texts that open and close a chain of thought, found and checked at the start.

The ids are looked for in what the policy sampled (`algo.egpo.cot_mask`), so they must be those
it samples, which are taken to be those the tokenizer gives for the same text:

* a marker that is a token of its own in the vocabulary, added or special, is that token wherever
  it stands;
* any other marker is several tokens, or one that came from merging, and what stands beside it
  may change them: in many vocabularies `>` and a newline are one token, so that `</think>` in
  front of a newline has other last tokens than alone. Such a marker is taken only if its ids are
  the same between all of `BEFORE` and `AFTER`.

A stable marker can still be sampled in another cut, which no tokenizer gives; it is then not seen.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.data.codec import HFCodec

BEFORE = ("", "\n", "\n\n", " ", "a", "1", ".", ")")
AFTER = ("", "\n", "\n\n", " a", "a", "1", ".", "<")

ADVICE = (
    "; take markers that are tokens of their own (add them to the tokenizer), or "
    "algo.egpo.blocks=response, which needs none"
)


def cot_markers(codec: HFCodec, texts: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the opening and of the closing marker.

    texts: the two, of algo.egpo.markers. Raises `ValueError` for one that does not read back, or
    whose ids depend on what stands beside it.
    """
    start, end = texts
    return _ids(codec, start), _ids(codec, end)


def _ids(codec: HFCodec, text: str) -> tuple[int, ...]:
    own = codec.added_id(text)
    if own is not None:
        return (own,)
    ids = tuple(codec.encode(text))
    if not ids or codec.decode(ids) != text:
        raise ValueError(
            f"algo.egpo.markers: {text!r} becomes the tokens {list(ids)}, which read "
            f"{codec.decode(ids)!r}; expected tokens that read the same; probable cause: a "
            f"tokenizer that lacks some of its characters{ADVICE}"
        )
    for before, after in product(BEFORE, AFTER):
        if not _is_found(codec, before, text, after, ids):
            raise ValueError(
                f"algo.egpo.markers: {text!r} becomes the tokens {list(ids)} alone, and others in "
                f"{before + text + after!r}; expected the same, or it is not found in what the "
                "policy samples; probable cause: the tokenizer merges its ends with the text "
                f"beside it{ADVICE}"
            )
    return ids


def _is_found(codec: HFCodec, before: str, text: str, after: str, ids: tuple[int, ...]) -> bool:
    """Whether the ids stand exactly where the marker does."""
    around = codec.encode(before + text + after)
    stops = range(len(around) - len(ids) + 1)
    return any(
        tuple(around[stop : stop + len(ids)]) == ids and codec.decode(around[:stop]) == before
        for stop in stops
    )
