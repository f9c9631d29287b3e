"""An endless stream of indices that is reshuffled every epoch and can be resumed.

The permutation of an epoch depends on (seed, epoch) alone, so a position is two numbers.
Within an epoch every index comes exactly once; a request may reach over its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class ShuffledStream:
    """Indices 0 .. num_items - 1 in a new order each epoch."""

    def __init__(self, num_items: int, seed: int) -> None:
        if num_items < 1:
            raise ValueError(f"ShuffledStream: num_items={num_items}, expected at least 1")
        self._num_items = num_items
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """Of the index that was given last; 0 before the first."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        taken: list[int] = []
        while len(taken) < count:
            if self._position == self._num_items:
                self._epoch += 1
                self._position = 0
                self._order = self._permutation(self._epoch)
            part = self._order[self._position : self._position + count - len(taken)]
            taken.extend(part)
            self._position += len(part)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        return {
            "seed": self._seed,
            "num_items": self._num_items,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken; seed and size must be the same."""
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(
                f"sampler state: got keys {sorted(state)}, expected {sorted(expected)}; "
                "is it from another version?"
            )
        for key in ("seed", "num_items"):
            if state[key] != expected[key]:
                raise ValueError(
                    f"sampler state: {key}={state[key]}, expected {expected[key]}; the run was "
                    "saved with another seed or another dataset"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self._num_items:
            raise ValueError(
                f"sampler state: epoch={epoch} position={position}, expected epoch >= 0 and "
                f"position in 0..{self._num_items}; the state is damaged"
            )
        self._epoch = epoch
        self._position = position
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self._seed, epoch])
        order: list[int] = rng.permutation(self._num_items).tolist()
        return order
