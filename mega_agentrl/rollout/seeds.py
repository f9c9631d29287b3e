"""Seeds of engine requests, from where a request stands in the run and not from when it ran.

A seed is a hash of (run seed, step, prompt key, tree path, turn, part). So with seeded
sampling a tree does not depend on scheduling, on the other prompts, or on the process.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # engines and torch take a non-negative int64


def request_seed(
    seed: int, step: int | str, prompt_key: str, path: tuple[int, ...], turn: int, part: int
) -> int:
    """A number in [0, 2^63), the same in every process.

    part: which request of the turn, as a turn that begins with a probe takes several.
    """
    return _hashed(seed, step, prompt_key, path, turn, part)


def continued_seed(seed: int, num_tokens: int) -> int:
    """For the rest of a request that was ended after `num_tokens` and had the seed `seed`."""
    return _hashed(seed, num_tokens)


def _hashed(*where: object) -> int:
    digest = hashlib.blake2b(repr(where).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
