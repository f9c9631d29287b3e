"""Finds and checks the token ids of the chain-of-thought markers (`algo.egpo.cot_markers`).

`algo.egpo.cot_mask` searches sampled responses for the ids, so they must be the ids that the policy
samples. The policy is assumed to sample a marker as the tokenizer encodes it:

* A marker that is an added or special token is that token in any context.
* Any other marker is several tokens or one merged token, which its neighbours may change: in many
  vocabularies `>` and a newline are one token, so that `</think>` before a newline ends with other
  tokens than alone. Such a marker is accepted only if its ids are the same between all of
  `LEFT_CONTEXTS` and `RIGHT_CONTEXTS`.

The policy can still sample a marker as other tokens than the tokenizer's; it is then not found.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.data.encoding.codec import HFCodec

KEY = "algo.egpo.cot_markers"
LEFT_CONTEXTS = ("", "\n", "\n\n", " ", "a", "1", ".", ")")
RIGHT_CONTEXTS = ("", "\n", "\n\n", " a", "a", "1", ".", "<")

REMEDY = (
    "; take markers that are tokens of their own (add them to the tokenizer), or "
    "algo.egpo.cot_blocks=response, which needs none"
)


def cot_marker_ids(codec: HFCodec, texts: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids of the opening and the closing marker.

    Args:
        codec: the tokenizer.
        texts: the opening and closing marker of `algo.egpo.cot_markers`.

    Raises:
        ConfigError: a marker does not decode to itself, or its ids depend on its context.
    """
    start, end = texts
    return _marker_ids(codec, start), _marker_ids(codec, end)


def _marker_ids(codec: HFCodec, text: str) -> tuple[int, ...]:
    added_id = codec.added_token_id(text)
    if added_id is not None:
        return (added_id,)
    ids = tuple(codec.encode(text))
    if not ids or codec.decode(ids) != text:
        raise ConfigError(
            KEY,
            text,
            f"a text that its tokens {list(ids)} decode to, not to {codec.decode(ids)!r}{REMEDY}",
            "a tokenizer that lacks some of its characters",
        )
    for before, after in product(LEFT_CONTEXTS, RIGHT_CONTEXTS):
        if not _occurs_in_context(codec, before, text, after, ids):
            raise ConfigError(
                KEY,
                text,
                f"a text with the tokens {list(ids)} in any context, so that it is found in a "
                f"response, but they are others in {before + text + after!r}{REMEDY}",
                "the tokenizer merges its ends with the text beside it",
            )
    return ids


def _occurs_in_context(
    codec: HFCodec, before: str, text: str, after: str, ids: tuple[int, ...]
) -> bool:
    """Return whether the ids occur exactly at the marker's position."""
    context_ids = codec.encode(before + text + after)
    starts = range(len(context_ids) - len(ids) + 1)
    return any(
        tuple(context_ids[start : start + len(ids)]) == ids
        and codec.decode(context_ids[:start]) == before
        for start in starts
    )
