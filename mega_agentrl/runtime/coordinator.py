"""Coordinate the policy and the engines of a run (`types.protocols.Policy`).

The coordinator owns both groups and everything that concerns both: the lock that serializes the use
of the policy's ranks, the weight version that the engines serve, GPUs that policy and engines
share, and the replacement of lost engines.

    build -> Coordinator -> {WeightSynchronizer, GpuTimeSharing, EngineSupervisor}
                         -> {PolicyGroup, GeneratorGroup} -> remote_calls

Every operation of the policy runs under the lock, and so does every operation of a model on its
GPUs (`cluster.colocated_models`). On GPUs shared with engines or other models,
`policy_group.RANK_OPERATIONS` says whether an operation needs the GPUs.

Two threads call the coordinator: the training loop and the engine supervisor. Locks are taken in
the order coordinator, GPUs, engine registry. The supervisor never waits for the coordinator's lock,
whose holder may be waiting for an engine that the supervisor replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.runtime.remote_calls import (
    NoEngineLeftError,
    PolicyRankDiedError,
    RemoteCallError,
)
from mega_agentrl.runtime.workers.engine_supervisor import EngineSupervisor
from mega_agentrl.runtime.workers.gpu_time_sharing import ALL_STATE, GpuOwner
from mega_agentrl.runtime.workers.policy_group import RANK_OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, FileRecord
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.reshard.planner.traffic import TransferTraffic
    from mega_agentrl.runtime.weight_sync import WeightSynchronizer
    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.gpu_time_sharing import (
        GpuTimeSharing,
        ModelTurns,
        OffloadableModel,
    )
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.protocols import Generator

ResultT = TypeVar("ResultT")


class Coordinator:
    """The policy of a run, with the engines that serve its weights; both have started.

    `models` are those on the policy's GPUs. `gpus` is None if the engines have their own.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        engines: GeneratorGroup,
        weight_sync: WeightSynchronizer,
        models: ModelTurns,
        gpus: GpuTimeSharing | None,
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._weight_sync = weight_sync
        self._models = models
        self._gpus = gpus
        self._lock = threading.RLock()
        self._has_unsynced_weights = False
        self._version = 0
        self._supervisor = EngineSupervisor(
            engines,
            self.sync_new_engines,
            nullcontext if gpus is None else gpus.reserve_for_engine_start,
        )

    def start(self) -> None:
        """Start to supervise the engines."""
        self._supervisor.start()

    def close(self) -> None:
        """Stop supervising, and kill all engines and ranks; safe to call twice."""
        self._supervisor.close()
        self._engines.close()
        self._policy.close()

    def connect(self) -> TransferTraffic:
        """Open the link of the weight transfer to all engines; return the traffic of an update.

        If an engine is lost meanwhile, this waits for its replacement and starts over.

        Raises:
            RemoteCallError: A rank did not join; names the rank.
            ValueError: The shard layouts of the two sides do not fit together.
        """
        with self._lock:
            return self._retry_if_engines_were_replaced(
                lambda: self._weight_sync.connect(self._engines.registry.live_engines)
            )

    def sync_weights(self, generator: Generator, version: int) -> Mapping[str, float]:
        """Send the current weights to all engines as this version and route requests to them.

        If an engine is lost meanwhile, the sync waits for its replacement and starts over.

        Returns:
            The report of `WeightSynchronizer.sync`.

        Raises:
            RemoteCallError: The transfer failed; names ranks, tensor and bucket. The engines then
                refuse requests.
            ValueError: The weights that arrived are wrong.
        """
        assert generator is self._engines, "the engines of this run"
        registry = self._engines.registry
        with self._lock:
            if self._gpus is not None and registry.lost_reasons:
                # Engines can only be replaced while the policy is off the GPUs.
                self._replace_lost_engines(registry.num_handled_losses)
            engines, report = self._retry_if_engines_were_replaced(
                partial(self._sync_live_engines, version)
            )
            self._has_unsynced_weights = False
            self._version = version
            self._engines.serve_version(version, engines)
        return report

    def sync_new_engines(self, engines: Sequence[int]) -> bool:
        """Send the served weights to new engines.

        The other engines keep serving, except on shared GPUs, where all receive them again.

        Returns:
            False if the engines have to wait for the next sync, because the policy is busy, owns
            the GPUs, or has weights newer than the served version.
        """
        if not self._lock.acquire(blocking=False):
            return False  # its holder may be waiting for these engines
        try:
            if self._has_unsynced_weights:
                return False
            if self._gpus is None:
                self._models.set_gpu_resident(ALL_STATE)
                self._weight_sync.sync_separately(engines, self._version)
                return True
            if self._gpus.owner is not GpuOwner.engines:
                return False
            self._weight_sync.disconnect()  # the link belongs to replaced processes
            try:
                synced, _ = self._sync_live_engines(self._version)
            except (RemoteCallError, ValueError):
                self._gpus.offload_policy()  # so that a failed engine can be replaced
                raise
            for engine in synced:
                self._engines.enable_routing(engine)
            return True
        finally:
            self._lock.release()

    def _sync_live_engines(self, version: int) -> tuple[list[int], dict[str, float]]:
        """Send the weights to all engines that run; return their indices and the report."""
        # An engine that starts meanwhile is not awake and waits for `sync_new_engines`.
        engines = self._engines.registry.live_engines
        if not engines:
            raise NoEngineLeftError({}, "the weights have no receiver")
        release = None if self._gpus is None else partial(self._gpus.release_to_engines, engines)
        try:
            if self._gpus is None:
                self._models.set_gpu_resident(ALL_STATE)
            else:
                self._gpus.acquire_for_transfer(engines)
            return engines, self._weight_sync.sync(engines, version, release)
        except (RemoteCallError, ValueError):
            self._weight_sync.disconnect()
            raise

    def _retry_if_engines_were_replaced(self, call: Callable[[], ResultT]) -> ResultT:
        """Return the result of a call on both sides, starting over when lost engines are replaced.

        Raises:
            RemoteCallError: The cause was not an engine's death, or no engine is left.
        """
        while True:
            num_handled_losses = self._engines.registry.num_handled_losses
            try:
                return call()
            except PolicyRankDiedError:
                raise
            except RemoteCallError:
                if not self._replace_lost_engines(num_handled_losses):
                    raise

    def _replace_lost_engines(self, num_handled_losses: int) -> bool:
        """Wait until lost engines are replaced; return whether the sync can be tried again."""
        if self._gpus is not None:
            self._gpus.offload_policy()
            self._weight_sync.disconnect()  # the link would lack engines replaced meanwhile
        return self._supervisor.replace_lost_engines(num_handled_losses)

    def restart(self) -> None:
        """Restart all policy ranks with the initial weights; the engines keep their weights."""
        with self.reserve_gpus(self._policy):
            self._has_unsynced_weights = True  # also if a rank dies again meanwhile
            self._weight_sync.reset_policy_ranks()
            self._policy.restart()

    @contextmanager
    def reserve_gpus(self, model: OffloadableModel) -> Iterator[None]:
        """Keep all others off the policy's GPUs while the ranks of a model on them start."""
        with self._lock:
            if self._gpus is not None:
                self._gpus.acquire_for_models()
            self._models.make_room(model)
            yield

    @contextmanager
    def model_turn(self, model: OffloadableModel, method: str) -> Iterator[None]:
        """Run an operation of a model on the policy's GPUs under the lock.

        After an operation between two syncs, engines that served before it get the same weights
        again, which they lost when they were put to sleep.
        """
        operation = RANK_OPERATIONS[method]
        with self._lock:
            were_serving = self._gpus is not None and self._gpus.owner is GpuOwner.engines
            if operation.needs_gpu:
                if self._gpus is not None:
                    self._gpus.acquire_for_models()
                self._models.load(model)
            yield
            if were_serving and operation.is_between_syncs:
                self.sync_weights(self._engines, self._version)

    @contextmanager
    def _operation(self, method: str) -> Iterator[None]:
        """Run an operation of the policy under the lock, with the GPUs if it needs them."""
        with self.model_turn(self._policy, method):
            self._has_unsynced_weights |= RANK_OPERATIONS[method].changes_weights
            yield

    def compute_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with log-probs and entropies, each [B, T] float32."""
        with self._operation("compute_log_probs"):
            return self._policy.compute_log_probs(batch)

    def update(
        self,
        batch: TrainBatch,
        kl_weight_BT: torch.Tensor | None = None,
        has_signal_B: torch.Tensor | None = None,
    ) -> UpdateStats:
        """Train on the batch like `PolicyGroup.update`, and return the stats of rank 0."""
        with self._operation("update"):
            return self._policy.update(batch, kl_weight_BT, has_signal_B)

    def sft_step(self, batch: TrainBatch) -> UpdateStats:
        """Train on a batch of demonstrations."""
        with self._operation("sft_step"):
            return self._policy.sft_step(batch)

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state on all ranks."""
        with self._operation("reset_optimizer"):
            self._policy.reset_optimizer()

    def set_objective(self, algo: AlgoConfig, temperature: float) -> None:
        """Set loss settings and sampling temperature on all ranks."""
        with self._operation("set_objective"):
            self._policy.set_objective(algo, temperature)

    def start_save(self, folder: Path) -> CheckpointManifest:
        """Let the ranks copy their state and start to write it to a folder."""
        with self._operation("start_save"):
            return self._policy.start_save(folder)

    def save_result(self, wait_s: float) -> Mapping[str, FileRecord] | None:
        """Return the files of all ranks by name; None if a rank is not done after `wait_s`."""
        return self._policy.save_result(wait_s)

    def abandon_save(self) -> None:
        """End the running save, if there is one."""
        self._policy.abandon_save()

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint and return the extra values saved with it."""
        with self._operation("load_checkpoint"):
            return self._policy.load_checkpoint(folder)

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        with self._operation("export_hf"):
            self._policy.export_hf(folder)

    def start_profile(self) -> None:
        """Start a profiler trace on rank 0."""
        self._policy.start_profile()

    def stop_profile(self, file: Path) -> None:
        """Stop the trace on rank 0 and write it to a file."""
        self._policy.stop_profile(file)

    def gpu_name(self) -> str:
        """Return the CUDA name of the policy's GPUs; empty on CPUs."""
        return self._policy.gpu_name()
