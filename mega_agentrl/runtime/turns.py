"""Who has the GPUs where policy and engines share them (`cluster.colocated`).

    to_policy     engines sleep -> the policy loads weights, gradients and optimizer
    to_transfer   gradients and optimizer off -> the engines wake room for their weights
    to_engines    the policy's weights off -> the engines wake an empty KV cache

A step goes once around: rollouts, `to_policy` for log-probs and update, `to_transfer` and
`to_engines` around the transfer. A transfer may begin while the engines have the GPUs (a new
engine, weights sent again after a checkpoint): they sleep first, so that a KV cache and the
policy's weights never lie side by side. A sleeping engine has no weights at all
(`generator.sleep`), hence whoever ends the engines' turn after a send must send again.

Turns are taken under `PolicyGroup.turn`. Beside that, `_room` is held from `to_policy` or
`to_transfer` until the policy is off its GPUs, and by the keeper while it starts an engine, as
vLLM must find its share free: each waits for the other; unblocked by `to_engines`, `make_room`
or the end of the start, which has a deadline.

On CPUs the order is the same and no memory is gained. What only GPUs can show: that the parts fit
as the preflight says, and how long the moves take.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

EVERYTHING = frozenset(("weights", "gradients", "optimizer"))
WEIGHTS = frozenset(("weights",))
NOTHING: frozenset[str] = frozenset()


class Occupant(Protocol):
    """The policy's ranks."""

    def occupy(self, parts: frozenset[str]) -> None:
        """Have these parts on the GPUs and all others in host memory."""


class Sleepers(Protocol):
    """The engines, which have numbers."""

    def sleep(self) -> None:
        """All give up weights and KV cache; those that are asleep stay so."""

    def wake(self, part: str, only: Sequence[int]) -> None:
        """Some have room for `weights`, or an empty `cache`."""


class Holder(StrEnum):
    """Whose turn it is; `transfer`: the weights of both are there."""

    policy = "policy"
    transfer = "transfer"
    engines = "engines"


class Turns:
    """Begins with the policy's: the engines have started and sleep."""

    def __init__(self, policy: Occupant, engines: Sleepers) -> None:
        self._policy = policy
        self._engines = engines
        self._holder = Holder.policy
        self._room = threading.Lock()
        self._room.acquire()

    @property
    def holder(self) -> Holder:
        """Whose turn it is."""
        return self._holder

    def to_policy(self) -> None:
        """Load all of the policy; nothing happens where it is loaded."""
        if self._holder is not Holder.policy:
            self._take(Holder.policy)
            self._policy.occupy(EVERYTHING)

    def to_transfer(self, engines: Sequence[int]) -> None:
        """Have the weights of the policy, and room for those of these engines."""
        if self._holder is Holder.engines:
            self._take(Holder.transfer)
        self._holder = Holder.transfer
        self._policy.occupy(WEIGHTS)
        self._engines.wake("weights", engines)

    def to_engines(self, engines: Sequence[int]) -> None:
        """The weights have come: the policy leaves, and these engines can compute."""
        self.make_room()
        self._engines.wake("cache", engines)

    def make_room(self) -> None:
        """The policy leaves, dead or alive; the engines are as they are, and can be started."""
        if self._holder is Holder.engines:
            return
        try:
            self._policy.occupy(NOTHING)
        finally:
            self._holder = Holder.engines
            self._room.release()

    def renew_policy(self) -> None:
        """The policy's ranks are about to start anew, with all they need loaded."""
        if self._holder is not Holder.policy:
            self._take(Holder.policy)

    @contextmanager
    def start_of_engine(self) -> Iterator[None]:
        """An engine starts meanwhile, and sleeps at the end of it."""
        with self._room:
            yield

    def _take(self, holder: Holder) -> None:
        # Before the room is taken: an engine that hangs is replaced meanwhile, in that room.
        self._engines.sleep()
        if self._holder is Holder.engines:
            self._room.acquire()
        self._holder = holder
