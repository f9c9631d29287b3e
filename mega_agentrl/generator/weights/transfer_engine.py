"""A vLLM weight-transfer engine that receives weights over the project's transfer sessions.

Every worker of an engine is a rank of the session and receives exactly its own shards, from trainer
ranks or from workers of other engines, into its parameters (`weight_writer`). A module that shares
the parameters of another (a tied output layer) receives nothing; at the end of an update it is
repacked for its kernel from the shared parameter, which vLLM's reload does not do.

On a link with adapters the weights below them are received once, and kept. An update then consists
of the factors, which are merged here; all other modules stay as they are.

    ready     -> `start_weight_update`   -> receiving  parameters can be loaded
    receiving -> `receive_weights`       -> received   or failed
    received  -> `verify`                -> verified   or failed: digests differ
    verified  -> `finish_weight_update`  -> ready      the new version
    any       -> `reject`                -> failed     until an update succeeds
    ready     -> `release_weights`       -> released   until an update succeeds

In every state except ready, a step of the model raises, so that a worker never computes with
weights that are not verified. Since such an error ends the engine, updates are rejected only while
no request runs.

No other method raises, because vLLM would then take the other workers' answers for answers to the
next call. Errors are recorded in `failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from mega_agentrl.generator.weights.loader_trace import trace_worker_layout
from mega_agentrl.generator.weights.weight_writer import ModuleWeightWriter
from mega_agentrl.reshard.adapters import AdapterReceiver
from mega_agentrl.reshard.session import TransferContent, TransferSession, join_session
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests

if TYPE_CHECKING:
    import numpy as np

    from mega_agentrl.reshard.executor import TransferExecutor
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion


class UpdateState(Enum):
    """State of a weight update; the model computes only in `ready`."""

    ready = auto()
    receiving = auto()
    received = auto()
    verified = auto()
    failed = auto()
    released = auto()


@dataclass(frozen=True, slots=True)
class UpdateFailure:
    """Why an update failed."""

    reason: str
    is_caused_by_peer: bool
    """Whether a peer was lost, in which case that peer reports the cause."""


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):
    """Arguments of `init_transfer_engine`."""

    session: bytes
    """A pickled `TransferSession`."""
    first_rank: int
    """Rank of the engine's first worker."""


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):
    """Arguments of `receive_weights`."""

    version: int
    """Weight version that is being sent."""
    contents: list[str] = field(default_factory=lambda: [TransferContent.weights])
    """Sessions of the link in which it is sent, in order."""


class ReshardTransferEngine(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):
    """Receives and verifies the weights of one worker."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failure: UpdateFailure | None = None
        self.executors: dict[str, TransferExecutor] = {}
        """Executors of the sessions that were joined, by content."""
        self.writer: ModuleWeightWriter | None = None
        """Writes what arrives in the session of all weights; None before it was joined."""
        self._state = UpdateState.ready
        self._layout: list[ShardLayout] | None = None
        self._adapters: AdapterReceiver | None = None
        self._digests: ReceivedDigests | None = None
        self._tied_modules: dict[str, torch.nn.Module] = {}
        self.model.register_forward_pre_hook(lambda module, args: self.check_weights_verified())

    def check_weights_verified(self) -> None:
        """Raise `RuntimeError` unless the weights are verified."""
        if self._state is not UpdateState.ready:
            reason = f"a weight update is in state {self._state.name!r}"
            if self.failure is not None:
                reason = self.failure.reason
            raise RuntimeError(f"forward pass refused: {reason}")

    def guard_execute_model(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model runner's step, preceded by `check_weights_verified`.

        CUDA graphs bypass the forward hook of the model.
        """

        def step(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self.check_weights_verified()
            return execute_model(scheduled, *args, **kwargs)

        return step

    def layout(self) -> list[ShardLayout]:
        """Return the rectangles of Hugging Face tensors that this worker needs."""
        if self._layout is None:
            self._layout = trace_worker_layout(self.vllm_config)
        return self._layout

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Join a session; returns when all of its ranks have joined.

        The session of all weights comes first, and leaves those of earlier links.
        """
        self.failure = None
        with self._recording_failure("joining the weight transfer"):
            session = TransferSession.from_bytes(init_info.session)
            rank = init_info.first_rank + get_tensor_model_parallel_rank()
            if session.content == TransferContent.adapters:
                assert self._adapters is not None, "the session of weights has the settings"
                executor = join_session(session, rank, self._adapters.layout)
            else:
                self.shutdown()
                executor = join_session(session, rank, self.layout())
                self._prepare_writer(session)
            self.executors[session.content] = executor

    def _prepare_writer(self, session: TransferSession) -> None:
        layout, dtypes = self.layout(), session.plan.dtype_of
        self._digests, self._adapters = ReceivedDigests(layout, dtypes), None
        if session.lora is not None:
            (dtype,) = {getattr(torch, name) for name in dtypes.values()}
            device = next(self.model.parameters()).device
            self._adapters = AdapterReceiver(layout, session.lora, dtype, device)
        self.writer = ModuleWeightWriter(self.model, layout, self._digests, self._adapters)

    def start_weight_update(self) -> None:
        """Make the parameters loadable again."""
        self.failure = None
        with self._recording_failure("start of a weight update"):
            if not self.executors:
                raise ValueError("expected a session; none was joined, or it has failed")
            self._state, self._tied_modules = UpdateState.receiving, {}

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Receive all weights of one version."""
        if self._state is not UpdateState.receiving:
            return
        with self._recording_failure(f"weight version {update_info.version}"):
            for content in update_info.contents:
                if content == TransferContent.weights:
                    self._receive_all(update_info.version)
                else:
                    self._receive_adapters(update_info.version)
            self._state = UpdateState.received

    def _receive_all(self, version: int) -> None:
        assert self.writer is not None, "created with the executor"
        self._tied_modules = find_tied_modules(self.model)
        initialize_layerwise_reload(self.model)
        self.writer.begin_update()
        self.executors[TransferContent.weights].receive(self.writer, version)
        self.writer.check_complete()

    def _receive_adapters(self, version: int) -> None:
        assert self.writer is not None, "created with the executor"
        assert self._adapters is not None, "created with the executor"
        self._adapters.begin_update()
        self.executors[TransferContent.adapters].receive(self._adapters, version)
        self._adapters.check_complete()
        self.writer.merge_adapters()

    def verify(self, version: int, expected: np.ndarray) -> None:
        """Compare the received weights with the trainer's digests, `[regions, 2]` uint32."""
        if self._state is not UpdateState.received:
            return
        with self._recording_failure(f"weight version {version}"):
            assert self._digests is not None, "created with the executor"
            if mismatches := self._digests.find_mismatches(expected):
                raise ValueError(self._mismatch_message(mismatches))
            self._state = UpdateState.verified

    def finish_weight_update(self) -> None:
        """Allow steps again if the weights are verified, else reject the update."""
        if self._state is not UpdateState.verified:
            self.reject(f"finished in state {self._state.name!r}, expected 'verified'")
            return
        with self._recording_failure("end of a weight update"):
            finalize_layerwise_reload(self.model, self.model_config)
            for module in self._tied_modules.values():
                module.quant_method.process_weights_after_loading(module)
            self._state = UpdateState.ready

    def reject(self, reason: str) -> None:
        """Give up the current update, and refuse steps until one succeeds."""
        self._fail(UpdateFailure(reason, is_caused_by_peer=False))
        self._state = UpdateState.failed

    def release_weights(self) -> None:
        """Refuse steps until an update succeeds, because the memory of the weights is freed."""
        if self._state is UpdateState.ready:
            self._state = UpdateState.released

    def shutdown(self) -> None:
        """Leave all sessions."""
        for executor in self.executors.values():
            executor.close()
        self.executors = {}

    def _mismatch_message(self, mismatches: list[DigestRegion]) -> str:
        assert self._digests is not None, "created with the executor"
        executor = self.executors[TransferContent.weights]
        name, rect = mismatches[0]
        routes = "; ".join(
            f"rank {source} in bucket {', '.join(map(str, buckets[:8]))}"
            for source, buckets in executor.sources_of(name).items()
        )
        if self._adapters is not None:
            routes += ", before adapters were merged"
        others = [other for other in dict.fromkeys(region.hf_name for region in mismatches)][1:]
        return (
            f"verification failed: {name} {rect} on rank {executor.rank} is not what the "
            f"trainer holds ({len(mismatches)} of {len(self._digests.regions)} regions differ); "
            f"it came from {routes}" + (f"; also wrong: {', '.join(others[:8])}" if others else "")
        )

    @contextmanager
    def _recording_failure(self, operation: str) -> Iterator[None]:
        """Record an error in `failure` instead of raising it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the edge of the worker process
            # If a peer is gone or late, the executor's error is chained to the transport's.
            caused_by_peer = isinstance(error, RuntimeError) and isinstance(
                error.__cause__, RuntimeError
            )
            kind = "" if isinstance(error, RuntimeError | ValueError) else type(error).__name__
            reason = ": ".join(filter(None, (operation, kind, str(error))))
            self._fail(UpdateFailure(reason, is_caused_by_peer=caused_by_peer))

    def _fail(self, failure: UpdateFailure) -> None:
        self.failure = self.failure or failure
        self.shutdown()  # peers that still wait fail at once
        if self._state in (UpdateState.receiving, UpdateState.received, UpdateState.verified):
            self._state = UpdateState.failed
            # Restore whole modules with undefined values, as the next update expects.
            with self._recording_failure("return from a weight update"):
                finalize_layerwise_reload(self.model, self.model_config)


def find_tied_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules, by name, whose parameters all belong to earlier modules."""
    owned: set[int] = set()
    tied_modules = {}
    for name, module in model.named_modules():
        ids = {id(parameter) for parameter in _own_parameters(module)}
        if ids and ids <= owned:
            tied_modules[name] = module
        owned |= ids
    return tied_modules


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
