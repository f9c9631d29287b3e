"""Split decoded text into one piece per token, whose concatenation is the whole text.

A token may be part of a character, and some decoders drop the space before the first token. The
piece of a token is therefore the text that it adds after the previous token. Parts of a character
are empty; the token that completes the character gets all of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLACEMENT_CHAR = "\ufffd"
_MAX_TOKENS_PER_CHAR = 6


class TokenTexts:
    """Splits token ids into texts.

    Args:
        decode: decodes token ids, keeping special tokens and spaces.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._cached_text_after = lru_cache(maxsize=200_000)(self._text_after)

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return [N] texts of N token ids."""
        found: list[str] = []
        before: int | None = None
        partial: tuple[int, ...] = ()
        for token in token_ids:
            piece = self._cached_text_after(before, (*partial, token))
            if piece.endswith(REPLACEMENT_CHAR) and len(partial) < _MAX_TOKENS_PER_CHAR:
                found.append("")
                partial = (*partial, token)
                continue
            found.append(piece)
            before, partial = token, ()
        if partial:
            found[-1] = self._cached_text_after(before, partial)
        return found

    def _text_after(self, before: int | None, tokens: tuple[int, ...]) -> str:
        if before is None:
            return self._decode(tokens)
        start = self._decode((before,))
        both = self._decode((before, *tokens))
        # `before` alone is no text if it completes a character of several tokens.
        return both.removeprefix(start) if both.startswith(start) else self._decode(tokens)
