"""Random batches: holes in the masks, rows without a token, groups of one, far-off log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

SPREADS = (0.0, 0.01, 0.3, 3.0, 30.0)
"""Standard deviations, in nats, of the difference of two policies' log-probs."""


@dataclass(frozen=True, slots=True)
class RandomBatch:
    """Tensors that the compared functions read."""

    mask_BT: torch.Tensor
    group_B: torch.Tensor
    reward_B: torch.Tensor
    reward_BT: torch.Tensor
    """Rewards on some tokens, 0 on masked ones."""
    value_BT: torch.Tensor
    old_value_BT: torch.Tensor
    advantage_BT: torch.Tensor
    logp_BT: torch.Tensor
    old_logp_BT: torch.Tensor
    ref_logp_BT: torch.Tensor
    weight_BT: torch.Tensor
    """Importance weights, some of them 0."""
    gamma: float
    number: int
    """A number from 1 on for settings that are chosen at random."""

    @property
    def num_tokens(self) -> int:
        """Number of unmasked tokens."""
        return int(self.mask_BT.sum())

    def __repr__(self) -> str:
        parts = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return ", ".join(
            f"{name}={value.tolist() if isinstance(value, torch.Tensor) else value}"
            for name, value in parts
        )


def random_batches(count: int, seed: int) -> Iterator[RandomBatch]:
    """Yield batches of 1 to 8 rows and 1 to 12 tokens, each with at least one unmasked token."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for _ in range(count):
        shape = num_rows, _ = number(1, 9), number(1, 13)
        mask_BT = torch.rand(shape, generator=generator) < (0.3, 0.8, 1.0)[number(0, 3)]
        mask_BT[torch.rand(num_rows, generator=generator) < 0.1] = False
        mask_BT[number(0, num_rows), 0] = True
        reward_B = normal(num_rows)
        reward_B = (reward_B, reward_B.sign().clamp(min=0), (3 * reward_B).round() / 10)[
            number(0, 3)
        ]
        old_logp_BT = -normal(*shape).abs() - 0.01
        gap_BT = SPREADS[number(0, len(SPREADS))] * normal(*shape)
        weight_BT = (2 * normal(*shape)).clamp(min=0)
        yield RandomBatch(
            mask_BT=mask_BT,
            group_B=torch.randint(0, 3, (num_rows,), generator=generator),
            reward_B=reward_B,
            reward_BT=normal(*shape) * mask_BT * (torch.rand(shape, generator=generator) < 0.3),
            value_BT=normal(*shape),
            old_value_BT=normal(*shape),
            advantage_BT=normal(*shape),
            logp_BT=old_logp_BT + gap_BT,
            old_logp_BT=old_logp_BT,
            ref_logp_BT=old_logp_BT - gap_BT.flip(0),
            weight_BT=weight_BT,
            gamma=(1.0, 0.9)[number(0, 2)],
            number=number(1, 1000),
        )


def with_one_advantage_per_row(batch: RandomBatch) -> RandomBatch:
    """Return the batch with the first token's advantage on all tokens of a row."""
    advantage_BT = batch.advantage_BT[:, :1].expand_as(batch.mask_BT)
    return replace(batch, advantage_BT=advantage_BT.clone())
