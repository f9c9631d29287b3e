"""Tracks the prompts that the policy has mastered, so that the sampler may skip them (ARES option).

A visit is one group of trajectories of a prompt. A prompt is mastered if all its trajectories were
correct in two visits in a row and the mean token entropy of the last visit is in the lowest fifth
of all visited prompts. A mastered prompt is skipped, but visited again with probability 0.1 per
epoch; the draw depends only on seed, epoch and prompt. If a trajectory of a visit is wrong, the
prompt is no longer mastered.

Checkpoints store `MasteryState`. B trajectories.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.errors import InputError

MIN_CORRECT_VISITS = 2
"""Visits in a row with only correct trajectories after which a prompt can be mastered."""
LOW_ENTROPY_QUANTILE = 0.2
"""Quantile of the prompts' entropies that a mastered prompt does not exceed."""
REVISIT_PROBABILITY = 0.1
"""Probability per epoch that a mastered prompt is not skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasteryState:
    """Results of the latest visits to each prompt."""

    correct_streaks: Mapping[str, int] = field(default_factory=dict)
    """Consecutive visits with only correct trajectories, by prompt id."""
    last_entropies: Mapping[str, float] = field(default_factory=dict)
    """Mean token entropy of the last visit in nats, by prompt id."""

    def mastered_prompts(self) -> frozenset[str]:
        """Return the prompts that are mastered now."""
        if not self.last_entropies:
            return frozenset()
        entropies = torch.tensor(list(self.last_entropies.values()), dtype=torch.float64)
        bound = float(entropies.quantile(LOW_ENTROPY_QUANTILE))
        return frozenset(
            prompt_id
            for prompt_id, streak in self.correct_streaks.items()
            if streak >= MIN_CORRECT_VISITS and self.last_entropies[prompt_id] <= bound
        )

    def skipped_prompts(self, *, seed: int, epoch: int) -> frozenset[str]:
        """Return the mastered prompts that this epoch skips."""
        return frozenset(
            prompt_id
            for prompt_id in self.mastered_prompts()
            if random.Random(f"{seed}/{epoch}/{prompt_id}").random() >= REVISIT_PROBABILITY
        )


def update(
    state: MasteryState, prompt_ids: Sequence[str], correct_B: torch.Tensor, entropy_B: torch.Tensor
) -> MasteryState:
    """Return the state after one visit to each of these prompts.

    Args:
        state: state before the visit.
        prompt_ids: prompt of each of the B trajectories; equal ids form a group.
        correct_B: [B] bool or 0/1, whether each trajectory is correct.
        entropy_B: [B] mean token entropy of each trajectory, nats.

    Raises:
        ValueError: the numbers of trajectories differ.
    """
    check_same_shape(correct_B=correct_B, entropy_B=entropy_B)
    if len(prompt_ids) != len(correct_B):
        expected = f"{len(correct_B)}, one for each trajectory of correct_B"
        raise InputError("number of prompt_ids", len(prompt_ids), expected)
    indices_by_prompt: dict[str, list[int]] = {}
    for index, prompt_id in enumerate(prompt_ids):
        indices_by_prompt.setdefault(prompt_id, []).append(index)
    streaks, entropies = dict(state.correct_streaks), dict(state.last_entropies)
    for prompt_id, indices in indices_by_prompt.items():
        all_correct = bool(correct_B[indices].bool().all())
        streaks[prompt_id] = streaks.get(prompt_id, 0) + 1 if all_correct else 0
        entropies[prompt_id] = float(entropy_B[indices].double().mean())
    return MasteryState(correct_streaks=streaks, last_entropies=entropies)
