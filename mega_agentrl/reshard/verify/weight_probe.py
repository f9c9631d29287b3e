"""A fixed prompt whose log-probs must agree between trainer and engines after a weight update.

Digests prove that the bytes arrived. That both sides interpret them alike (which rows belong to the
gate projection, which heads are query heads) shows only in the model's output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from mega_agentrl.types.batch import TrainBatch

_PROBE_SEED = 20


def probe_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Return pseudo-random token ids that are the same in every process and run."""
    rng = random.Random(_PROBE_SEED)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def probe_batch(token_ids: Sequence[int], num_rows: int) -> TrainBatch:
    """Return a batch whose rows all have the first token as prompt and the others as response."""
    response_BT = torch.tensor(token_ids[1:]).repeat(num_rows, 1)
    zeros_BT = torch.zeros_like(response_BT)
    zeros_B = torch.zeros(num_rows, dtype=torch.int64)
    return TrainBatch(
        prompt_ids=((token_ids[0],),) * num_rows,
        response_BT=response_BT,
        length_B=zeros_B + response_BT.size(1),
        mask_BT=zeros_BT.bool(),
        group_B=zeros_B,
        reward_B=zeros_B.float(),
        tree_token_BT=zeros_BT,
        rollout_logp_BT=zeros_BT.float(),
        rollout_entropy_BT=zeros_BT.float(),
        version_BT=zeros_BT,
    )
