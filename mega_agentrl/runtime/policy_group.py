"""The policy as one object: a Ray actor per Megatron rank behind the `Policy` port.

Every rank gets the whole batch (one shared object) and works on its own part of it; only
the ranks that hold results answer with more than None. The ranks of a tensor-parallel group
stay inside one node.

A rank that died or hangs is a `RankLostError`, whatever the others fell over meanwhile: the group
is of no use then, and `restart` makes it anew, with the weights of the start.

One thing at a time is asked of the ranks, from whatever thread (`turn`). Where they share GPUs with
the engines (`share`), whatever needs the model there takes the GPUs' turn as well (`turns`), and
what comes between two sends gives it back with the weights that were served.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from mega_agentrl.runtime.rank_group import RankActor, RankGroup, rows_of
from mega_agentrl.runtime.remote import ModelGoneError, RankGoneError, RemoteError
from mega_agentrl.runtime.turns import Holder
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.courier import Courier
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.proof import Region, Witness
    from mega_agentrl.reshard.transport import WeightLink
    from mega_agentrl.reshard.whereabouts import Whereabouts
    from mega_agentrl.runtime.bridge import WeightBridge
    from mega_agentrl.runtime.heartbeat import Station
    from mega_agentrl.runtime.turns import Turns
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.ports import Generator


_OPERATIONS = {"logprobs": "log-prob pass", "supervise": "supervised step", "load": "load weights"}
"""What words of the ranks call a method, where its name is not plain enough."""

_CHANGES_WEIGHTS = frozenset({"update", "supervise", "resume"})

_ON_GPU = _CHANGES_WEIGHTS | {
    "export",
    "load",
    "logprobs",
    "reset_optimizer",
    "save",
    "set_objective",
}
"""Methods of the ranks that need the model, or its optimizer, on the GPUs."""


class PolicyActor(RankActor):
    """One policy rank in a process of its own; a `types.ports.WeightSource`.

    Forwards calls to `actor.policy.PolicyRank`.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        world_size: int,
        log_file: str,
        heart: tuple[Station, str] | None = None,
    ) -> None:
        super().__init__(config, rank, world_size, log_file, heart)
        self._policy: Any = None
        self._store: Any = None
        self._links: dict[str, tuple[Courier, Witness]] = {}

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups and build the model, still without weights."""
        from mega_agentrl.actor.policy import PolicyRank
        from mega_agentrl.estimate.measured import PROCESS

        PROCESS.begin()
        with doing("start"):
            self._policy = PolicyRank(self._config, self._seat(master_address, master_port))

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of the rank."""
        with doing(_OPERATIONS.get(method, method)):
            return getattr(self._policy, method)(*args)

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the meeting point of the weight transfer; its address and port."""
        from mega_agentrl.reshard.transport import open_store

        address = ray.util.get_node_ip_address()
        self._store = open_store(address, timeout_s)
        return address, self._store.port

    def layout(self) -> list[ShardLayout]:
        """Which rectangles of which Hugging Face tensors this rank holds."""
        shards: list[ShardLayout] = self._policy.layout()
        return shards

    def whereabouts(self) -> Whereabouts:
        """Which machine and device this rank is on."""
        from mega_agentrl.reshard.whereabouts import here

        return here()

    def join(self, link: WeightLink, regions: Sequence[Region]) -> None:
        """Join a link; returns when all its ranks have. regions: what is to be proven over it."""
        from mega_agentrl.reshard.proof import Witness
        from mega_agentrl.reshard.transport import join

        layout = self.layout()
        witness = Witness(layout, regions, link.plan.dtype_of)
        with doing("meeting for the weight transfer", "the ranks of the link"):
            courier = join(link, self._rank, layout, store=self._store)
        self._links[link.key] = (courier, witness)

    def send(self, key: str, version: int) -> np.ndarray:
        """Send this rank's part over a link; returns what it can say of the regions."""
        courier, witness = self._links[key]
        shards = {s.name: self._policy.parameter(s.name) for s in self.layout()}
        with doing("weight transfer"):
            courier.send(shards, version, witness.watch())
            return witness.testify(self._policy.parameter)

    def leave(self, key: str) -> None:
        """Leave a link; nothing happens where this rank is not in it."""
        if key in self._links:
            courier, _ = self._links.pop(key)
            courier.close()


class PolicyGroup(RankGroup):
    """All policy ranks; implements `types.ports.Policy`."""

    kind = "policy"
    log_name = "policy"
    actor_class = PolicyActor
    hosts_engines = True

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        super().__init__(actors, config)
        self._bridge: WeightBridge | None = None
        self._turns: Turns | None = None
        self._gpus: list[str] = []
        self.turn = threading.RLock()
        self.is_ahead = False
        """Whether the weights are others than those that the engines were sent."""

    def start(self) -> None:
        """Join all ranks and load the starting weights."""
        super().start()
        self.call_all("load", self._config.model.path)

    def restart(self) -> None:
        """Start all ranks anew with the starting weights; the engines keep what they have."""
        with self.turn:
            if self._turns is not None:
                self._turns.renew_policy()
            super().restart()
            self.is_ahead = True
            if self._bridge is not None:
                self._bridge.forget_policy()

    def explain(self, error: RemoteError) -> Exception:
        """`RankLostError` where a rank is dead or silent."""
        explained = super().explain(error)
        return RankGoneError(str(explained)) if isinstance(explained, ModelGoneError) else explained

    def attach(self, bridge: WeightBridge) -> None:
        """Give the policy its way to the engines."""
        self._bridge = bridge

    def share(self, turns: Turns) -> None:
        """From now on take turns on the GPUs."""
        self._turns = turns

    def lodging(self, engine: int) -> tuple[Any, str]:
        """Scheduling strategy and GPUs of an engine that shares those of this group's ranks."""
        assert self._placement is not None, "places are reserved at the launch"
        if not self._gpus:
            self._gpus = list(
                self.gather("GPUs of the policy", self.start_on_ranks("visible_gpus")).values()
            )
        size = self._config.engine.tensor
        gpus = self._gpus[engine * size : (engine + 1) * size]
        return self._placement.of_engine(engine), ",".join(filter(None, gpus))

    def occupy(self, parts: frozenset[str]) -> None:
        """Have these of weights, gradients and optimizer on the GPUs, the others in host memory."""
        self.call_all("occupy", parts)

    @contextmanager
    def _between_sends(self) -> Iterator[None]:
        """Engines that serve before, serve the same weights after; asleep they had to lose them."""
        with self.turn:
            serve = self._turns is not None and self._turns.holder is Holder.engines
            yield
            if serve and self._bridge is not None:
                self._bridge.send_again()

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method of all ranks' policies and wait; results in rank order."""
        with self.turn:
            if self._turns is not None and method in _ON_GPU:
                self._turns.to_policy()
            self.is_ahead = self.is_ahead or method in _CHANGES_WEIGHTS
            return list(self.gather(f"policy {method}", self.start_call(method, *args)).values())

    def _call_first(self, method: str, *args: Any) -> Any:
        """Run a method of rank 0's policy alone and wait."""
        name = self.name(0)
        call = self._actors[0].call.remote(method, *args)
        return self.gather(f"policy {method}", {name: call})[name]

    def start_call(self, method: str, *args: Any) -> dict[str, Any]:
        """Start a method of all ranks' policies; object refs by rank name."""
        return self.start_on_ranks("call", method, *args)

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the meeting point of the weight transfer on rank 0; its address and port."""
        name = self.name(0)
        calls = {name: self._actors[0].open_store.remote(timeout_s)}
        address: tuple[str, int] = self.gather("meeting point of the weight transfer", calls)[name]
        return address

    def add_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """See `Policy.add_logprobs`."""
        shared = ray.put(batch)
        logp_BT, entropy_BT = self._logprobs(batch, shared, reference=False)
        batch = batch.with_fields(old_logp_BT=logp_BT, entropy_BT=entropy_BT)
        if self._config.algo.needs_reference:
            ref_logp_BT, _ = self._logprobs(batch, shared, reference=True)
            batch = batch.with_fields(ref_logp_BT=ref_logp_BT)
        return batch

    def _logprobs(
        self, batch: TrainBatch, shared: Any, *, reference: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp_BT = torch.zeros(batch.response_BT.shape, dtype=torch.float32)
        entropy_BT = torch.zeros_like(logp_BT)
        answers = self.call_all("logprobs", shared, reference)
        for rows, part_logp_BT, part_entropy_BT in rows_of(answers, batch.num_rows):
            logp_BT[rows] = part_logp_BT
            entropy_BT[rows] = part_entropy_BT
        return logp_BT, entropy_BT

    def update(self, batch: TrainBatch, kl_weight_BT: Any | None = None) -> UpdateStats:
        """See `Policy.update`."""
        weight = None if kl_weight_BT is None else ray.put(kl_weight_BT)
        stats: UpdateStats = self.call_all("update", ray.put(batch), weight)[0]
        return stats

    def supervise(self, batch: TrainBatch) -> UpdateStats:
        """See `Policy.supervise`."""
        stats: UpdateStats = self.call_all("supervise", ray.put(batch))[0]
        return stats

    def reset_optimizer(self) -> None:
        """See `Policy.reset_optimizer`."""
        with self._between_sends():
            self.call_all("reset_optimizer")

    def send_weights(self, generator: Generator, version: int) -> Mapping[str, float]:
        """See `Policy.send_weights`."""
        assert self._bridge is not None, "attach() comes before the first send"
        return self._bridge.send(generator, version)

    def set_objective(self, algo: AlgoConfig, temperature: float) -> None:
        """See `Policy.set_objective`."""
        rollout = replace(self._config.rollout, temperature=temperature)
        self._config = replace(self._config, algo=algo, rollout=rollout)
        with self._between_sends():
            self.call_all("set_objective", algo, temperature)

    def save(
        self, folder: Path, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        """See `Policy.save`."""
        with self._between_sends():
            self.call_all("save", str(folder.resolve()), dict(extra or {}), keep)

    def resume(self, folder: Path) -> dict[str, Any]:
        """See `Policy.resume`."""
        extra: dict[str, Any] = self.call_all("resume", str(folder.resolve()))[0]
        return extra

    def begin_profile(self) -> None:
        """See `Policy.begin_profile`."""
        self._call_first("begin_profile")

    def end_profile(self, file: Path) -> None:
        """See `Policy.end_profile`."""
        self._call_first("end_profile", str(file.resolve()))

    def gpu_name(self) -> str:
        """Of the policy's GPUs as CUDA calls them; empty on CPUs."""
        return str(self._call_first("gpu_name"))

    def export(self, folder: Path) -> None:
        """See `Policy.export`."""
        self.call_all("export", str(folder))
