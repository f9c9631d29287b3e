"""Cuts a prompt that is too long, by tokens (`data.truncation`).

What the chat template writes behind the messages, the generation prompt, stays at the end
whatever is cut; of everything before it, the tools the template lists and its first tokens
included,

    left     goes the beginning,
    right    goes the end: of the last message, as a rule,
    middle   goes the middle; the two halves that stay differ by one token at most.

verl's `right` cuts the generation prompt too. A cut falls between any two tokens. The messages of
the prompt stay whole: rewards and reports show these, and `rollout.template_check`, which compares
with what they render to, reports every cut prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mega_agentrl.config.choices import Truncation


def cut(
    token_ids: Sequence[int], num_last: int, max_tokens: int, truncation: Truncation
) -> tuple[int, ...]:
    """At most `max_tokens` of the ids; the last `num_last` are kept.

    Raises ValueError where these leave no room for anything else.
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


def num_behind(token_ids: Sequence[int], without: Sequence[int]) -> int:
    """How many tokens the generation prompt has. without: the ids rendered without it."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, without, strict=False))
    return len(token_ids) - sum(1 for _ in same)
