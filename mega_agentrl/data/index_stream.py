"""An endless, resumable stream of indices in a new order every epoch.

Without weights every index occurs exactly once per epoch, in an order that depends only on (seed,
epoch). With weights, an index of weight w occurs floor(w) or ceil(w) times, w on average:
systematic sampling (Kitagawa 1996) with one offset u in [0, 1),

    count_i = floor(W_i + u) - floor(W_{i-1} + u),      W the cumulative sum in a random order,

which also keeps the length of the epoch within 1 of the sum of the weights. The weights are
requested at the start of each epoch and may change between epochs; the state then holds the epoch's
order. A single request may span the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mega_agentrl.errors import InputError

EpochWeightsFn = Callable[[], Sequence[float]]
"""Returns the weights of the epoch that starts, one per index and not all 0."""


class ShuffledIndexStream:
    """Endless stream of the indices 0 .. num_items - 1, in a new order each epoch."""

    def __init__(
        self,
        num_items: int,
        seed: int,
        *,
        shuffle: bool = True,
        epoch_weights_fn: EpochWeightsFn | None = None,
    ) -> None:
        """Create the stream at the start of epoch 0.

        Args:
            num_items: number of indices.
            seed: seed of all epochs' orders.
            shuffle: whether to shuffle; otherwise indices ascend, in several passes if a weight is
                above 1.
            epoch_weights_fn: weights of the indices; None gives every index once per epoch.
        """
        if num_items < 1:
            raise InputError("num_items", num_items, "at least 1")
        self._num_items = num_items
        self._seed = seed
        self._shuffle = shuffle
        self._epoch_weights_fn = epoch_weights_fn
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def num_epochs(self) -> float:
        """Indices returned so far, in epochs: 1.5 is the middle of the second one."""
        return self._epoch + self._position / len(self._order)

    @property
    def epoch_size(self) -> int:
        """Number of indices of the current epoch."""
        return len(self._order)

    @property
    def epoch(self) -> int:
        """Epoch of the last index returned, 0 before the first."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices."""
        indices: list[int] = []
        while len(indices) < count:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order(self._epoch)
            chunk = self._order[self._position : self._position + count - len(indices)]
            indices.extend(chunk)
            self._position += len(chunk)
        return indices

    def start_epoch(self, epoch: int) -> None:
        """Continue with the first index of an epoch."""
        self._epoch, self._position = epoch, 0
        self._order = self._epoch_order(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""
        state: dict[str, Any] = {
            "seed": self._seed,
            "num_items": self._num_items,
            "epoch": self._epoch,
            "position": self._position,
        }
        return state if self._epoch_weights_fn is None else state | {"order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was saved; seed and size must be the same."""
        expected = self.state_dict()
        if set(state) != set(expected):
            cause = "it is from another version, or weights were added or removed"
            raise InputError("sampler state", sorted(state), f"the keys {sorted(expected)}", cause)
        for key in ("seed", "num_items"):
            if state[key] != expected[key]:
                cause = "the run was saved with another seed or another dataset"
                raise InputError(f"sampler state, {key}", state[key], str(expected[key]), cause)
        epoch, position = int(state["epoch"]), int(state["position"])
        order = [int(index) for index in state["order"]] if "order" in state else None
        size = self._num_items if order is None else len(order)
        if epoch < 0 or not 0 <= position <= size:
            raise InputError(
                "sampler state, epoch and position",
                (epoch, position),
                f"an epoch of at least 0 and a position in 0..{size}",
                "the state is damaged",
            )
        if order is not None and not all(0 <= index < self._num_items for index in order):
            raise InputError(
                f"sampler state, order of epoch {epoch}",
                f"indices {min(order)} to {max(order)}",
                f"0 to {self._num_items - 1}",
                "the state is damaged",
            )
        self._epoch = epoch
        self._position = position
        self._order = self._epoch_order(epoch) if order is None else order

    def _epoch_order(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self._seed, epoch])
        items = np.arange(self._num_items)
        if self._epoch_weights_fn is not None:
            counts = systematic_sample_counts(self._epoch_weights_fn(), rng)
            # All first occurrences, then all second ones: without shuffling, the copies of an index
            # are not adjacent.
            rounds = range(int(counts.max(initial=0)))
            items = np.concatenate([items[:0], *(items[counts > number] for number in rounds)])
        if self._shuffle:
            items = items[rng.permutation(len(items))]
        order: list[int] = items.tolist()
        return order


def systematic_sample_counts(weights: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Draw how often each index occurs, `weights` on average, by systematic sampling.

    Returns:
        [N] int64 counts.

    Raises:
        ValueError: a weight is negative or not finite, or none is above 0.
    """
    weight_N = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(weight_N).all() or weight_N.min() < 0 or weight_N.max() <= 0:
        raise InputError(
            "weights",
            f"{weight_N.min()} to {weight_N.max()}",
            "finite, non-negative weights, at least one of them above 0",
        )
    permutation_N = rng.permutation(len(weight_N))
    cumulative_N = np.floor(np.cumsum(weight_N[permutation_N]) + rng.random()).astype(np.int64)
    count_N = np.empty_like(cumulative_N)
    count_N[permutation_N] = np.diff(cumulative_N, prepend=0)
    return count_N
