"""Which prompts the policy has mastered, so that a sampler may leave them out (ARES's option).

A prompt is mastered when all its trajectories were correct in two visits in a row and the mean
token entropy of the last one is in the lowest fifth of all prompts seen. A mastered prompt is
skipped, but comes back with probability .1 in every epoch, by a coin that depends on seed, epoch
and prompt only; a visit at which it fails ends its mastery.

`Mastery` is a value, kept in the checkpoint. Drawing prompts is the sampler's business.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo.shapes import same_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISITS = 2
ENTROPY_SHARE = 0.2
RETURN_PROBABILITY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mastery:
    """streaks: visits in a row with only correct trajectories, by prompt id. entropies: mean
    token entropy at the last visit, nats.
    """

    streaks: Mapping[str, int] = field(default_factory=dict)
    entropies: Mapping[str, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Numbers and strings only; survives JSON and `from_plain` exactly."""
        return {"streaks": dict(self.streaks), "entropies": dict(self.entropies)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Mastery:
        """What `to_plain` wrote."""
        return cls(streaks=dict(plain["streaks"]), entropies=dict(plain["entropies"]))

    def mastered(self) -> frozenset[str]:
        """The prompts that are mastered now."""
        if not self.entropies:
            return frozenset()
        known = torch.tensor(list(self.entropies.values()), dtype=torch.float64)
        bound = float(known.quantile(ENTROPY_SHARE))
        return frozenset(
            prompt_id
            for prompt_id, streak in self.streaks.items()
            if streak >= VISITS and self.entropies[prompt_id] <= bound
        )

    def skipped(self, *, seed: int, epoch: int) -> frozenset[str]:
        """The mastered prompts that this epoch leaves out."""
        return frozenset(
            prompt_id
            for prompt_id in self.mastered()
            if random.Random(f"{seed}/{epoch}/{prompt_id}").random() >= RETURN_PROBABILITY
        )


def update(
    state: Mastery, prompt_ids: Sequence[str], correct_B: torch.Tensor, entropy_B: torch.Tensor
) -> Mastery:
    """The state after one visit to each of these prompts.

    prompt_ids: of each of B trajectories; equal = one group. correct_B: [B] bool or 0/1.
    entropy_B: [B] mean token entropy, nats.
    """
    same_shape(correct_B=correct_B, entropy_B=entropy_B)
    if len(prompt_ids) != len(correct_B):
        raise ValueError(
            f"mastery: got {len(prompt_ids)} prompt_ids and correct_B {tuple(correct_B.shape)}, "
            "expected one id per trajectory"
        )
    rows: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(prompt_ids):
        rows.setdefault(prompt_id, []).append(row)
    streaks, entropies = dict(state.streaks), dict(state.entropies)
    for prompt_id, mine in rows.items():
        right = bool(correct_B[mine].bool().all())
        streaks[prompt_id] = streaks.get(prompt_id, 0) + 1 if right else 0
        entropies[prompt_id] = float(entropy_B[mine].double().mean())
    return Mastery(streaks=streaks, entropies=entropies)
