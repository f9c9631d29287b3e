"""The trajectories of a step, as the predictions of its duration need them.

Lengths follow L(u) = M u^(M / m - 1) for u from 0 to 1, a law with mean m and largest length M. It
has many short responses and few of the full length, which form the tail of a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig

MEAN_FRACTION = 0.4
"""Assumed mean length of responses and prompts, as a fraction of their limit."""
_TOOL_FRACTION = 0.25
"""Assumed share of a response that tools have written."""
CALL_S = 0.5
"""Assumed mean seconds of a tool call."""
_SHARED_FRACTION = 0.25
"""Assumed share of a response that a forked trajectory has from its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Numbers and mean lengths of the trajectories of a step, in tokens."""

    num_prompts: float
    group_size: int
    """Trajectories of a prompt."""
    prompt_tokens: float
    response_tokens: float
    """Mean tokens of a response, those of tools included."""
    max_response_tokens: float
    sampled_tokens: float
    """Tokens of a response that are sampled."""
    shared_tokens: float = 0.0
    """Tokens of a response that a trajectory has from its parent."""
    num_calls: float = 0.0
    """Tool calls of a trajectory."""
    call_s: float = 0.0
    """Mean seconds of a call."""
    expert_imbalance: float = 1.1
    """Tokens of the busiest expert rank divided by the mean, on average over the layers."""

    @property
    def num_trajectories(self) -> float:
        """Trajectories of the step."""
        return self.num_prompts * self.group_size

    @property
    def num_tokens(self) -> float:
        """Tokens of all trajectories, prompts included."""
        return self.num_trajectories * (self.prompt_tokens + self.response_tokens)

    @property
    def mean_square(self) -> float:
        """Mean of the squared lengths of responses."""
        return self.max_response_tokens**2 / (2 * self._exponent + 1)

    @property
    def _exponent(self) -> float:
        return self.max_response_tokens / self.response_tokens - 1

    def relative_lengths(self, number: int) -> list[float]:
        """Return `number` lengths, relative to their mean, in an order without a trend."""
        golden = 0.6180339887498949
        ranks = [(0.5 + index * golden) % 1.0 for index in range(number)]
        order = sorted(range(number), key=ranks.__getitem__)
        longest = self.max_response_tokens / self.response_tokens
        lengths = [0.0] * number
        for position, index in enumerate(order):
            lengths[index] = longest * ((position + 0.5) / number) ** self._exponent
        return lengths


def expected_workload(
    config: TrainConfig,
    *,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    call_s: float = CALL_S,
) -> Workload:
    """Return the workload that a configuration lets expect before it has run.

    Args:
        config: The run.
        prompt_tokens: Mean tokens of the prompts; None for `MEAN_FRACTION` of their limit.
        response_tokens: Mean tokens of the responses; None for `MEAN_FRACTION` of their limit.
        call_s: Mean seconds of a tool call.
    """
    rollout = config.rollout
    limit = rollout.max_response_tokens
    response = min(limit, response_tokens or MEAN_FRACTION * limit)
    num_calls = MEAN_FRACTION * min(rollout.max_tool_calls, rollout.max_turns - 1)
    return Workload(
        num_prompts=config.data.prompts_per_step,
        group_size=rollout.group_size,
        prompt_tokens=prompt_tokens or MEAN_FRACTION * config.data.max_prompt_tokens,
        response_tokens=response,
        max_response_tokens=limit,
        sampled_tokens=response * (1 - _TOOL_FRACTION if num_calls else 1),
        shared_tokens=response * _SHARED_FRACTION * _forked_fraction(config) if num_calls else 0.0,
        num_calls=num_calls,
        call_s=call_s,
    )


def measured_workload(config: TrainConfig, metrics: Mapping[str, float]) -> Workload:
    """Return the workload of a step that has run, from its line in `metrics.jsonl`."""
    mean = metrics["rollout/response_tokens_mean"]
    longest = max(mean, metrics["rollout/response_tokens_max"])
    group = config.rollout.group_size
    prompts = metrics["rollout/num_trajectories"] / group
    prompt = metrics["rollout/prompt_tokens_mean"]
    # The tokens of all trajectories over those of the trees tell what is shared.
    unique = group * (prompt + mean) / max(1.0, metrics.get("tree/token_ratio", 1.0))
    shared = max(0.0, (prompt + group * mean - unique) / group)
    return Workload(
        num_prompts=prompts,
        group_size=group,
        prompt_tokens=prompt,
        response_tokens=mean,
        max_response_tokens=longest,
        sampled_tokens=metrics["rollout/sampled_tokens_mean"],
        shared_tokens=shared,
        num_calls=metrics["rollout/tool_calls_mean"],
        call_s=metrics["rollout/tool_latency_mean_s"],
    )


def _forked_fraction(config: TrainConfig) -> float:
    """Return the share of a prompt's trajectories that are forks."""
    rollout = config.rollout
    if rollout.branching == "none":
        return 0.0
    roots = rollout.branch.initial_rollouts or ceil(rollout.group_size / 2)
    return 1 - min(roots, rollout.group_size) / rollout.group_size
