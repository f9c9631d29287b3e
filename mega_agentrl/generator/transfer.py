"""The worker's side of a weight update: our backend among vLLM's weight-transfer engines.

Every worker of an engine is a rank of the trainer's link and gets exactly its own bytes, from
trainer ranks or from workers of other engines, straight into its parameters (`landing`). A
module that shares the parameters of another (a tied output layer) gets nothing of its own; what
it has repacked for its kernel is made again from the shared parameter, which vLLM's reload
does not do.

    ready    -> `start_weight_update`    -> open       parameters are loadable
    open     -> `receive_weights`        -> received   or failed
    received -> `verify`                 -> verified   or failed: digests differ
    verified -> `finish_weight_update`   -> ready      the new version
    any      -> `reject`                 -> failed     until an update succeeds
    ready    -> `drop`                   -> dropped    until an update succeeds

In every state but ready a step of the model raises: the worker itself never computes with
weights that are not proven, whatever the engine asks of it. That ends the engine, so the engine
rejects only while nothing runs.

No method raises, apart from that: vLLM leaves the answers of the other workers in their queues
when one raises, and takes them for answers to the next call. What went wrong is in `failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

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

from mega_agentrl.generator.landing import ModuleLanding
from mega_agentrl.generator.trace import trace_worker
from mega_agentrl.reshard.proof import Regions
from mega_agentrl.reshard.transport import WeightLink, join

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mega_agentrl.reshard.courier import Courier
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.proof import Region


class State(Enum):
    """See the module."""

    ready = auto()
    open = auto()
    received = auto()
    verified = auto()
    failed = auto()
    dropped = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """is_consequence: a peer was lost, which has a reason of its own."""

    reason: str
    is_consequence: bool


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """link: `WeightLink.to_plain`."""

    link: bytes


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """version: weight version that is being sent."""

    version: int


class ReshardTransferEngine(WeightTransferEngine[LinkInfo, VersionInfo]):
    """One worker's receiver."""

    init_info_cls = LinkInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failure: Failure | None = None
        self._state = State.ready
        self._layout: list[ShardLayout] | None = None
        self._courier: Courier | None = None
        self._landing: ModuleLanding | None = None
        self._regions: Regions | None = None
        self._tied: dict[str, torch.nn.Module] = {}
        self.model.register_forward_pre_hook(lambda module, args: self.check_proven())

    def check_proven(self) -> None:
        """Raise `RuntimeError` where the model must not compute."""
        if self._state is not State.ready:
            reason = f"a weight update is in state {self._state.name!r}"
            if self.failure is not None:
                reason = self.failure.reason
            raise RuntimeError(f"forward pass refused: {reason}")

    def guarded(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        """The model runner's step behind `check_proven`: CUDA graphs pass by the model's hooks."""

        def step(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self.check_proven()
            return execute_model(scheduled, *args, **kwargs)

        return step

    def layout(self) -> list[ShardLayout]:
        """Which rectangles of which Hugging Face tensors this worker wants."""
        if self._layout is None:
            self._layout = trace_worker(self.vllm_config)
        return self._layout

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Join a link; returns when all its ranks have joined."""
        self.shutdown()
        self.failure = None
        with self._noting("joining the weight transfer"):
            link = WeightLink.from_plain(init_info.link)
            rank = link.plan.num_sources + link.first_sink + get_tensor_model_parallel_rank()
            self._courier = join(link, rank, self.layout())
            self._regions = Regions(self.layout(), link.plan.dtype_of)
            self._landing = ModuleLanding(self.model, self.layout(), self._regions)

    def start_weight_update(self) -> None:
        """Make the parameters loadable again."""
        self.failure = None
        with self._noting("start of a weight update"):
            if self._courier is None or self._landing is None:
                raise ValueError("expected a link; none was joined, or it has failed")
            self._state, self._tied = State.open, tied_modules(self.model)
            initialize_layerwise_reload(self.model)
            self._landing.begin()

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Receive everything of one version."""
        if self._state is not State.open:
            return
        with self._noting(f"weight version {update_info.version}"):
            assert self._courier is not None, "checked at the start"
            assert self._landing is not None, "made with the courier"
            self._courier.receive(self._landing, update_info.version)
            self._landing.check_complete()
            self._state = State.received

    def verify(self, version: int, expected: np.ndarray) -> None:
        """Compare with what the trainer says. expected: as in `Regions.mismatches`."""
        if self._state is not State.received:
            return
        with self._noting(f"weight version {version}"):
            assert self._regions is not None, "made with the courier"
            assert self._courier is not None, "checked at the start"
            if wrong := self._regions.mismatches(expected):
                raise ValueError(self._proof_failed(wrong))
            self._state = State.verified

    def finish_weight_update(self) -> None:
        """Serve again, if the weights are proven; else stay unusable."""
        if self._state is not State.verified:
            self.reject(f"finished in state {self._state.name!r}, expected 'verified'")
            return
        with self._noting("end of a weight update"):
            finalize_layerwise_reload(self.model, self.model_config)
            for module in self._tied.values():
                module.quant_method.process_weights_after_loading(module)
            self._state = State.ready

    def reject(self, reason: str) -> None:
        """Compute no more until an update succeeds; what is under way is given up."""
        self._fail(Failure(reason, is_consequence=False))
        self._state = State.failed

    def drop(self) -> None:
        """The memory of the weights is given up: compute no more until an update succeeds."""
        if self._state is State.ready:
            self._state = State.dropped

    def shutdown(self) -> None:
        """Leave the link."""
        if self._courier is not None:
            self._courier.close()
            self._courier = None

    def _proof_failed(self, wrong: list[Region]) -> str:
        assert self._regions is not None, "made with the courier"
        assert self._courier is not None, "checked at the start"
        name, rect = wrong[0]
        ways = "; ".join(
            f"rank {source} in bucket {', '.join(map(str, buckets[:8]))}"
            for source, buckets in self._courier.sources_of(name).items()
        )
        others = [other for other in dict.fromkeys(region.hf_name for region in wrong)][1:]
        return (
            f"proof failed: {name} {rect} on rank {self._courier.rank} is not what the trainer "
            f"holds ({len(wrong)} of {len(self._regions.regions)} regions differ); it came from "
            f"{ways}" + (f"; also wrong: {', '.join(others[:8])}" if others else "")
        )

    @contextmanager
    def _noting(self, operation: str) -> Iterator[None]:
        """Keep an error for whoever asks, see the module."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the edge of the worker process
            # The courier chains the wire's error to its own when a peer is gone or late.
            lost = isinstance(error, RuntimeError) and isinstance(error.__cause__, RuntimeError)
            kind = "" if isinstance(error, RuntimeError | ValueError) else type(error).__name__
            reason = ": ".join(filter(None, (operation, kind, str(error))))
            self._fail(Failure(reason, is_consequence=lost))

    def _fail(self, failure: Failure) -> None:
        self.failure = self.failure or failure
        self.shutdown()  # peers that still wait fail at once
        if self._state in (State.open, State.received, State.verified):
            self._state = State.failed
            # Back to whole modules, values undefined: the next update finds what it expects.
            with self._noting("return from a weight update"):
                finalize_layerwise_reload(self.model, self.model_config)


def tied_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules whose every parameter belongs to an earlier module, by name."""
    owned: set[int] = set()
    tied = {}
    for name, module in model.named_modules():
        ids = {id(parameter) for parameter in _own_parameters(module)}
        if ids and ids <= owned:
            tied[name] = module
        owned |= ids
    return tied


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
