"""Time sharing of the GPUs between policy and engines (`cluster.colocated`).

    acquire_for_policy     engines sleep -> the policy loads weights, gradients and optimizer
    acquire_for_transfer   gradients and optimizer offloaded -> engines allocate their weights
    release_to_engines     the policy's weights offloaded -> engines allocate an empty KV cache

A training step goes through all three: `acquire_for_policy` after the rollouts, for log-probs and
update, then the other two around the weight transfer. A transfer may also start while the engines
own the GPUs (for a new engine, or to resync after a checkpoint): they sleep first, so that a KV
cache and the policy's weights never occupy memory together. A sleeping engine has no weights at all
(`generator.sleep_mode`), so whoever puts the engines to sleep between two syncs must sync again.

Ownership changes only under the lock of the `Coordinator`. In addition, `_gpu_lock` is held from
`acquire_for_policy` or `acquire_for_transfer` until `release_to_engines` or `offload_policy`, and
by the engine supervisor while it starts an engine, which has a timeout, because vLLM must find its
share of memory free. On CPUs the order is the same, but no memory is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

ALL_STATE = frozenset(("weights", "gradients", "optimizer"))
WEIGHTS_ONLY = frozenset(("weights",))
NO_STATE: frozenset[str] = frozenset()


class OffloadablePolicy(Protocol):
    """Interface of the policy's ranks."""

    def set_gpu_resident(self, parts: frozenset[str]) -> None:
        """Keep these parts on the GPUs and all others in host memory."""


class SleepableEngines(Protocol):
    """Interface of the engines."""

    def sleep(self) -> None:
        """Free weights and KV cache of all engines that are awake."""

    def wake_up(self, part: str, engines: Sequence[int]) -> None:
        """Allocate `weights` or an empty `cache` in these engines."""


class GpuOwner(StrEnum):
    """Owner of the GPUs; during `transfer` both sides hold their weights."""

    policy = "policy"
    transfer = "transfer"
    engines = "engines"


class GpuTimeSharing:
    """Hands the GPUs over between policy and engines.

    The policy owns them at first, while the engines sleep.
    """

    def __init__(self, policy: OffloadablePolicy, engines: SleepableEngines) -> None:
        self._policy = policy
        self._engines = engines
        self._owner = GpuOwner.policy
        self._gpu_lock = threading.Lock()
        self._gpu_lock.acquire()

    @property
    def owner(self) -> GpuOwner:
        """Current owner of the GPUs."""
        return self._owner

    def acquire_for_policy(self) -> None:
        """Load the whole policy; does nothing if it is loaded."""
        if self._owner is not GpuOwner.policy:
            self._sleep_engines_and_acquire(GpuOwner.policy)
            self._policy.set_gpu_resident(ALL_STATE)

    def acquire_for_transfer(self, engines: Sequence[int]) -> None:
        """Load the policy's weights only, and allocate memory for the weights of these engines."""
        if self._owner is GpuOwner.engines:
            self._sleep_engines_and_acquire(GpuOwner.transfer)
        self._owner = GpuOwner.transfer
        self._policy.set_gpu_resident(WEIGHTS_ONLY)
        self._engines.wake_up("weights", engines)

    def release_to_engines(self, engines: Sequence[int]) -> None:
        """Offload the policy after a transfer and allocate the KV caches of these engines."""
        self.offload_policy()
        self._engines.wake_up("cache", engines)

    def offload_policy(self) -> None:
        """Offload the policy, dead or alive, so that engines can be started."""
        if self._owner is GpuOwner.engines:
            return
        try:
            self._policy.set_gpu_resident(NO_STATE)
        finally:
            self._owner = GpuOwner.engines
            self._gpu_lock.release()

    def reclaim_for_policy_restart(self) -> None:
        """Put the engines to sleep before the policy's ranks restart with everything loaded."""
        if self._owner is not GpuOwner.policy:
            self._sleep_engines_and_acquire(GpuOwner.policy)

    @contextmanager
    def reserve_for_engine_start(self) -> Iterator[None]:
        """Keep the policy off the GPUs while an engine starts; the engine must sleep at the end."""
        with self._gpu_lock:
            yield

    def _sleep_engines_and_acquire(self, owner: GpuOwner) -> None:
        # Before taking the lock: an engine that hangs is replaced meanwhile, under that lock.
        self._engines.sleep()
        if self._owner is GpuOwner.engines:
            self._gpu_lock.acquire()
        self._owner = owner
