"""TRL's reward functions."""

from __future__ import annotations

from collections.abc import Iterator

from trl.rewards import accuracy_reward

from tests.peers.answers import verdicts
from tests.peers.comparison import Comparison


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield the comparison; its inputs are a table."""
    yield verdicts("accuracy_reward, boxed", _verdict, unrecognized=True)


def _verdict(answer: str, truth: str) -> bool:
    completion = [{"role": "assistant", "content": rf"\boxed{{{answer}}}"}]
    return accuracy_reward([completion], [f"${truth}$"]) == [1.0]
