"""Truncates prompts that are too long, by tokens (`data.truncation`).

The generation prompt at the end is always kept. Of everything before it, including the tools that
the template lists,

    left     removes the beginning,
    right    removes the end, usually of the last message,
    middle   removes the middle and keeps two halves that differ by at most one token.

verl's `right` also cuts the generation prompt. A cut may fall between any two tokens. The messages
of the prompt stay complete for rewards and reports; `rollout.template_check`, which compares the
tokens with the rendered messages, reports every truncated prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mega_agentrl.config.enums import Truncation


def truncate_tokens(
    token_ids: Sequence[int], num_last: int, max_tokens: int, truncation: Truncation
) -> tuple[int, ...]:
    """Return at most `max_tokens` of the ids.

    Args:
        token_ids: ids of the prompt.
        num_last: number of tokens at the end that are always kept.
        max_tokens: maximum number of tokens.
        truncation: `left`, `right` or `middle`.

    Raises:
        ValueError: `num_last` leaves no room for other tokens, or `truncation` is another mode.
    """
    if len(token_ids) <= max_tokens:
        return tuple(token_ids)
    size = max_tokens - num_last
    if size < 1:
        raise ValueError(
            f"data.max_prompt_tokens={max_tokens}: expected more than the {num_last} tokens of the "
            "generation prompt"
        )
    body = tuple(token_ids[: len(token_ids) - num_last])
    last = tuple(token_ids[len(token_ids) - num_last :])
    match truncation:
        case Truncation.left:
            return body[-size:] + last
        case Truncation.right:
            return body[:size] + last
        case Truncation.middle:
            return body[: size - size // 2] + body[len(body) - size // 2 :] + last
        case _:
            raise ValueError(f"data.truncation={truncation}: expected left, right or middle")


def num_generation_prompt_tokens(token_ids: Sequence[int], without: Sequence[int]) -> int:
    """Return the length of the generation prompt; `without`: the ids rendered without it."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, without, strict=False))
    return len(token_ids) - sum(1 for _ in same)
