"""Seeds of engine requests.

A seed is a hash of (run seed, step, prompt key, tree path, turn, part). A tree therefore depends
neither on scheduling nor on other prompts nor on the process.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # engines and torch take a non-negative int64


def request_seed(
    seed: int, step: int | str, prompt_key: str, path: tuple[int, ...], turn: int, part: int
) -> int:
    """Return the seed of a request, in [0, 2^63).

    Args:
        seed: Seed of the run.
        step: Name of the pass.
        prompt_key: Name of the prompt, unique in the pass.
        path: Position in the tree.
        turn: Index of the turn in the response.
        part: Index of the request in its turn; a turn with a probe takes several requests.
    """
    return _hash_to_seed(seed, step, prompt_key, path, turn, part)


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Return the seed for continuing a request with this seed after `num_tokens` tokens."""
    return _hash_to_seed(seed, num_tokens)


def _hash_to_seed(*where: object) -> int:
    digest = hashlib.blake2b(repr(where).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
