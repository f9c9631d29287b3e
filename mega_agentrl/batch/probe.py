"""A fixed prompt that trainer and engines score alike, if they hold the same weights.

Digests prove that bytes arrived; that both sides mean the same by them (which rows are a gate,
which heads a query's) only shows in what the model says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from mega_agentrl.types.batch import TrainBatch

_SEED = 20


def probe_prompt(vocab: int, num_tokens: int) -> list[int]:
    """Token ids, the same in every process and run."""
    chosen = random.Random(_SEED)
    return [chosen.randrange(vocab) for _ in range(num_tokens)]


def probe_batch(token_ids: Sequence[int], num_rows: int) -> TrainBatch:
    """The prompt in every row: its first token as prompt, the others as response."""
    response_BT = torch.tensor(token_ids[1:]).repeat(num_rows, 1)
    nothing_BT = torch.zeros_like(response_BT)
    nothing_B = torch.zeros(num_rows, dtype=torch.int64)
    return TrainBatch(
        prompt_ids=((token_ids[0],),) * num_rows,
        response_BT=response_BT,
        length_B=nothing_B + response_BT.size(1),
        mask_BT=nothing_BT.bool(),
        group_B=nothing_B,
        reward_B=nothing_B.float(),
        node_BT=nothing_BT,
        rollout_logp_BT=nothing_BT.float(),
        rollout_entropy_BT=nothing_BT.float(),
        version_BT=nothing_BT,
    )
