"""Time sharing of GPUs: between policy and engines (`cluster.colocated`), and between models.

    acquire_for_models     engines sleep -> the policy loads weights, gradients and optimizer
    acquire_for_transfer   gradients and optimizer offloaded -> engines allocate their weights
    release_to_engines     the policy's weights offloaded -> engines allocate an empty KV cache

A training step goes through all three: `acquire_for_models` after the rollouts, for log-probs and
update, then the other two around the weight transfer. A transfer may also start while the engines
own the GPUs (for a new engine, or to resync after a checkpoint): they sleep first, so that a KV
cache and the policy's weights never occupy memory together. A sleeping engine has no weights at all
(`generator.sleep_mode`), so whoever puts the engines to sleep between two syncs must sync again.

Ownership changes only under the lock of the `Coordinator`. In addition, `_gpu_lock` is held from
`acquire_for_models` or `acquire_for_transfer` until `release_to_engines` or `offload_policy`, and
by the engine supervisor while it starts an engine, which has a timeout, because vLLM must find its
share of memory free. On CPUs the order is the same, but no memory is freed.

With `cluster.colocated_models`, critic and reward model are on the policy's GPUs, too. `ModelTurns`
keeps one of the models there and the others in host memory, whether engines share the GPUs or not;
engines see one model that owns the GPUs.
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


class OffloadableModel(Protocol):
    """Interface of the ranks of a model."""

    def set_gpu_resident(self, parts: frozenset[str]) -> None:
        """Keep these parts on the GPUs and all others in host memory."""


class SleepableEngines(Protocol):
    """Interface of the engines."""

    def sleep(self) -> None:
        """Free weights and KV cache of all engines that are awake."""

    def wake_up(self, part: str, engines: Sequence[int]) -> None:
        """Allocate `weights` or an empty `cache` in these engines."""


class ModelTurns:
    """Keeps the state of one model on the policy's GPUs; that of the policy at first."""

    def __init__(self, policy: OffloadableModel) -> None:
        self._policy = policy
        self._model = policy
        self._parts: frozenset[str] | None = ALL_STATE
        """Parts of the model that are on the GPUs; None if a call failed."""

    def set_gpu_resident(self, parts: frozenset[str]) -> None:
        """Keep these parts of the policy on the GPUs, and everything else in host memory."""
        self.load(self._policy, parts)

    def load(self, model: OffloadableModel, parts: frozenset[str] = ALL_STATE) -> None:
        """Keep these parts of a model on the GPUs, and everything else in host memory."""
        self._offload_others(model)
        if parts != self._parts:
            self._parts = None
            model.set_gpu_resident(parts)
            self._parts = parts

    def make_room(self, model: OffloadableModel) -> None:
        """Prepare for the start of a model's ranks, which begins with all state on the GPUs."""
        self._offload_others(model)
        self._parts = ALL_STATE

    def _offload_others(self, model: OffloadableModel) -> None:
        if model is not self._model:
            if self._parts != NO_STATE:
                self._model.set_gpu_resident(NO_STATE)
            self._model, self._parts = model, NO_STATE


class GpuOwner(StrEnum):
    """Owner of the GPUs: `policy` means all models; during `transfer` both sides hold weights."""

    policy = "policy"
    transfer = "transfer"
    engines = "engines"


class GpuTimeSharing:
    """Hands the GPUs over between policy and engines.

    The policy owns them at first, while the engines sleep. `models` are the policy and those that
    share its GPUs.
    """

    def __init__(self, models: ModelTurns, engines: SleepableEngines) -> None:
        self._models = models
        self._engines = engines
        self._owner = GpuOwner.policy
        self._gpu_lock = threading.Lock()
        self._gpu_lock.acquire()

    @property
    def owner(self) -> GpuOwner:
        """Current owner of the GPUs."""
        return self._owner

    def acquire_for_models(self) -> None:
        """Put the engines to sleep, so that the policy or another model can be loaded."""
        if self._owner is not GpuOwner.policy:
            self._sleep_engines_and_acquire(GpuOwner.policy)

    def acquire_for_transfer(self, engines: Sequence[int]) -> None:
        """Load the policy's weights only, and allocate memory for the weights of these engines."""
        if self._owner is GpuOwner.engines:
            self._sleep_engines_and_acquire(GpuOwner.transfer)
        self._owner = GpuOwner.transfer
        self._models.set_gpu_resident(WEIGHTS_ONLY)
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
            self._models.set_gpu_resident(NO_STATE)
        finally:
            self._owner = GpuOwner.engines
            self._gpu_lock.release()

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
