"""A fixed prompt whose log-probs must agree between trainer and engines after a weight update.

Digests prove that the bytes arrived. That both sides interpret them alike (which rows belong to the
gate projection, which heads are query heads) shows only in the model's output, and so does that an
engine still has the tensors that are no parameters after a sleep: vLLM restores its buffers, and
its checksums (`compute_weight_checksums`) cover parameters only.

The two sides are compared by the median difference over the prompt's tokens. In bfloat16, policy
and engine round differently, so that a router may choose another expert for a token. The log-prob
of that token then differs by nats, which shifts the mean over the tokens but not the median. A
wrong mapping changes the log-probs of most tokens by nats.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mega_agentrl.errors import InputError

_PROBE_SEED = 20

PROBE_TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest accepted median difference of the probe's log-probs, by dtype of the engine."""


def probe_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Return pseudo-random token ids that are the same in every process and run."""
    rng = random.Random(_PROBE_SEED)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def check_probe(
    engine: str, policy_logp_T: Sequence[float], engine_logp_T: Sequence[float], dtype: str
) -> float:
    """Return the median difference of the probe's log-probs, in nats.

    Args:
        engine: Name of the engine, for the error message.
        policy_logp_T: The policy's log-probs of the prompt's tokens after the first.
        engine_logp_T: The engine's log-probs of the same tokens.
        dtype: Dtype of the engine, a key of `PROBE_TOLERANCE_NATS`.

    Raises:
        ValueError: If the difference is above the tolerance, or not a number.
    """
    difference_T = np.abs(np.subtract(policy_logp_T, engine_logp_T))
    gap, limit = float(np.median(difference_T)), PROBE_TOLERANCE_NATS[dtype]
    if not gap <= limit:
        raise InputError(
            f"probe of {engine}, median difference in nats to the policy on a fixed prompt",
            gap,
            f"at most {limit:g}",
            "the same bytes, but names or heads mapped differently on both sides",
        )
    return gap
