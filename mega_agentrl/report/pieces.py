"""The text of each token by itself, so that the pieces put together are the text of all.

Tokens are not texts: one may hold half a character, and some decoders drop the space in front
of the first token. A token's piece is therefore what it adds to the text of the token before
it; parts of a character are empty, and the token that completes it has it whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
_MOST_PARTS = 6


class Pieces:
    """Pieces by a decoder of token ids, which keeps special tokens and spaces."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._piece = lru_cache(maxsize=200_000)(self._alone)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """[N] texts of N ids."""
        found: list[str] = []
        before: int | None = None
        held: tuple[int, ...] = ()
        for token in token_ids:
            piece = self._piece(before, (*held, token))
            if piece.endswith(BROKEN) and len(held) < _MOST_PARTS:
                found.append("")
                held = (*held, token)
                continue
            found.append(piece)
            before, held = token, ()
        if held:
            found[-1] = self._piece(before, held)
        return found

    def _alone(self, before: int | None, tokens: tuple[int, ...]) -> str:
        if before is None:
            return self._decode(tokens)
        start = self._decode((before,))
        both = self._decode((before, *tokens))
        # Behind the end of a character of several tokens, `before` alone is no text.
        return both.removeprefix(start) if both.startswith(start) else self._decode(tokens)
