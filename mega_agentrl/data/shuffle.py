"""An endless stream of indices, in a new order every epoch, that can be resumed.

Plainly, within an epoch every index comes exactly once, and the order depends on (seed, epoch)
alone, so that a position is two numbers. With weights an index with weight w comes floor(w) or
ceil(w) times, w on average: systematic sampling (Kitagawa 1996) by one offset u in [0, 1),

    count_i = floor(W_i + u) - floor(W_{i-1} + u),      W the running sum in a random order,

which also keeps the epoch's length within 1 of the sum of weights. Weights may be others in each
epoch; they are asked for as it begins, and the state then holds the order of the epoch. A request
may reach over the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Weigh = Callable[[], Sequence[float]]
"""The weights of the epoch that begins, one for each index, not all 0."""


class ShuffledStream:
    """Indices 0 .. num_items - 1 in a new order each epoch.

    shuffle: False keeps them in order; where one comes several times, so does the whole row.
    weigh: None, every index once.
    """

    def __init__(
        self, num_items: int, seed: int, *, shuffle: bool = True, weigh: Weigh | None = None
    ) -> None:
        if num_items < 1:
            raise ValueError(f"ShuffledStream: num_items={num_items}, expected at least 1")
        self._num_items = num_items
        self._seed = seed
        self._shuffle = shuffle
        self._weigh = weigh
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Of the index that was given last; 0 before the first."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        taken: list[int] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + count - len(taken)]
            taken.extend(part)
            self._position += len(part)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        state: dict[str, Any] = {
            "seed": self._seed,
            "num_items": self._num_items,
            "epoch": self._epoch,
            "position": self._position,
        }
        return state if self._weigh is None else state | {"order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken; seed and size must be the same."""
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(
                f"sampler state: got keys {sorted(state)}, expected {sorted(expected)}; "
                "is it from another version, or were there other weights?"
            )
        for key in ("seed", "num_items"):
            if state[key] != expected[key]:
                raise ValueError(
                    f"sampler state: {key}={state[key]}, expected {expected[key]}; the run was "
                    "saved with another seed or another dataset"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        order = [int(index) for index in state["order"]] if "order" in state else None
        size = self._num_items if order is None else len(order)
        if epoch < 0 or not 0 <= position <= size:
            raise ValueError(
                f"sampler state: epoch={epoch} position={position}, expected epoch >= 0 and "
                f"position in 0..{size}; the state is damaged"
            )
        if order is not None and not all(0 <= index < self._num_items for index in order):
            raise ValueError(
                f"sampler state: the order of epoch {epoch} has indices {min(order)} to "
                f"{max(order)}, expected 0 to {self._num_items - 1}; the state is damaged"
            )
        self._epoch = epoch
        self._position = position
        self._order = self._order_of(epoch) if order is None else order

    def _order_of(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self._seed, epoch])
        items = np.arange(self._num_items)
        if self._weigh is not None:
            counts = draw_counts(self._weigh(), rng)
            # First what comes at all, then what comes again: the same prompt is not its own
            # neighbour where the order is kept.
            rounds = range(int(counts.max(initial=0)))
            items = np.concatenate([items[:0], *(items[counts > number] for number in rounds)])
        if self._shuffle:
            items = items[rng.permutation(len(items))]
        order: list[int] = items.tolist()
        return order


def draw_counts(weights: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """[N] int64: how often each index comes, `weights` on average; see the module.

    Raises ValueError where no weight is above 0, or one is negative or not finite.
    """
    weight_N = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(weight_N).all() or weight_N.min() < 0 or weight_N.max() <= 0:
        raise ValueError(
            f"weights: got {weight_N.min()} to {weight_N.max()}, expected finite ones of 0 or "
            "more, and one above 0"
        )
    place_N = rng.permutation(len(weight_N))
    until_N = np.floor(np.cumsum(weight_N[place_N]) + rng.random()).astype(np.int64)
    count_N = np.empty_like(until_N)
    count_N[place_N] = np.diff(until_N, prepend=0)
    return count_N
