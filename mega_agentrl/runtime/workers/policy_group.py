"""The policy as a group of Ray actors, one per Megatron rank (`types.protocols.Policy`).

Every rank receives the rows of its data rank (`batch_sender`); ranks without results return None.
If a rank is dead or hangs, calls raise `RankLostError`, whatever errors the other ranks report;
`restart` then creates the group again with the initial weights. `Coordinator` serializes the calls
and shares the GPUs with the engines.

To add an operation: a method on `PolicyRank`, an entry in `RANK_OPERATIONS`, a method here and in
`Coordinator`, one in `types.protocols.Policy`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from mega_agentrl.batch.packed_rows import POLICY_TARGETS, unpack_scores
from mega_agentrl.config.enums import OldLogProbs, RouterReplay
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.runtime.remote_calls import (
    ModelRankDiedError,
    PolicyRankDiedError,
    RemoteCallError,
)
from mega_agentrl.runtime.workers.rank_group import RankActor, RankGroup
from mega_agentrl.types.activity import track_activity
from mega_agentrl.types.batch import UpdateScores
from mega_agentrl.types.routes import merge_recorded_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.reshard.device_location import DeviceLocation
    from mega_agentrl.reshard.executor import TransferExecutor
    from mega_agentrl.reshard.layout import PackedLayout, ShardLayout
    from mega_agentrl.reshard.session import TransferSession
    from mega_agentrl.reshard.verify.digest_verifier import SourceDigests
    from mega_agentrl.runtime.heartbeat import HeartbeatEndpoint
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOperation:
    """How `PolicyActor` and `Coordinator` run a method of the ranks."""

    label: str = ""
    """Name in activity reports; empty for the method's name."""
    needs_gpu: bool = False
    """Whether it needs the whole model and its optimizer on the GPUs."""
    changes_weights: bool = False
    """Whether the engines' weights are outdated afterwards."""
    is_between_syncs: bool = False
    """Whether engines that served before must serve the same weights afterwards."""


RANK_OPERATIONS = {
    "abandon_save": RankOperation(),
    "compute_log_probs": RankOperation(label="log-prob pass", needs_gpu=True),
    "compute_prompt_log_probs": RankOperation(),
    "compute_scores": RankOperation(needs_gpu=True),
    "compute_values": RankOperation(needs_gpu=True),
    "export_hf": RankOperation(needs_gpu=True),
    "gpu_name": RankOperation(),
    "kernels": RankOperation(),
    "load_checkpoint": RankOperation(needs_gpu=True, changes_weights=True),
    "load_hf": RankOperation(label="load weights", needs_gpu=True),
    "memory_stats": RankOperation(),
    "recorded_routes": RankOperation(),
    "reset_optimizer": RankOperation(needs_gpu=True, is_between_syncs=True),
    "save_result": RankOperation(),
    "set_gpu_resident": RankOperation(),
    "set_objective": RankOperation(needs_gpu=True, is_between_syncs=True),
    "sft_step": RankOperation(label="supervised step", needs_gpu=True, changes_weights=True),
    "start_profile": RankOperation(),
    "start_save": RankOperation(needs_gpu=True, is_between_syncs=True),
    "stop_profile": RankOperation(),
    "update": RankOperation(needs_gpu=True, changes_weights=True),
    "update_scores": RankOperation(),
}
"""All methods of the ranks in `actor` that the driver calls by name. The weights that
`changes_weights` speaks of are the policy's."""


@dataclass(slots=True, kw_only=True)
class _RankLink:
    """The sessions of a link that a rank has joined."""

    source_digests: SourceDigests
    """Digests of the weights that the engines are to have."""
    has_adapters: bool
    """Whether the engines merge adapters, so that these are sent apart from the weights."""
    executors: dict[str, TransferExecutor] = field(default_factory=dict)
    """By content of the session."""


class PolicyActor(RankActor):
    """Ray actor of one policy rank (`types.protocols.WeightSource`).

    Forwards calls to `actor.policy.PolicyRank`.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        world_size: int,
        log_file: str,
        heartbeat: tuple[HeartbeatEndpoint, str] | None = None,
        gpus: str | None = None,
    ) -> None:
        super().__init__(config, rank, world_size, log_file, heartbeat, gpus)
        self._policy: Any = None
        self._tcp_store: Any = None
        self._links: dict[str, _RankLink] = {}

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups and build the model, without loading weights."""
        from mega_agentrl.actor import device
        from mega_agentrl.actor.policy import PolicyRank
        from mega_agentrl.estimate.host_memory import PROCESS_MEMORY

        if not device.has_cuda():
            PROCESS_MEMORY.start()
        with track_activity("start"):
            self._policy = PolicyRank(self._config, self._rank_info(master_address, master_port))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank."""
        with track_activity(RANK_OPERATIONS[method].label or method):
            return getattr(self._policy, method)(*args)

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the rendezvous store of the weight transfer; return its address and port."""
        from mega_agentrl.reshard.session import open_store

        address = ray.util.get_node_ip_address()
        self._tcp_store = open_store(address, timeout_s)
        return address, self._tcp_store.port

    def layout(self) -> list[ShardLayout]:
        """Return the shards of this rank."""
        shards: list[ShardLayout] = self._policy.layout()
        return shards

    def packed_layout(self) -> tuple[PackedLayout, DeviceLocation]:
        """Return the shards of this rank, and its machine and device."""
        from mega_agentrl.reshard.device_location import current_device_location
        from mega_agentrl.reshard.layout import PackedLayout

        return PackedLayout.pack(self.layout()), current_device_location()

    def join_weight_transfer(self, session: TransferSession, regions: bytes) -> None:
        """Join a transfer session; returns when all its ranks have joined.

        Args:
            session: The session, with this rank's part of the plan.
            regions: Pickled regions whose digests this rank computes in every transfer.
        """
        from mega_agentrl.reshard.session import TransferContent, join_session
        from mega_agentrl.reshard.verify.digest_verifier import SourceDigests

        layout = self.layout()
        if session.content == TransferContent.weights:
            digests = SourceDigests(layout, pickle.loads(regions), session.plan.dtype_of)
            self._links[session.key] = _RankLink(
                source_digests=digests, has_adapters=session.lora is not None
            )
        else:
            layout = self._policy.adapter_layout()
        with track_activity("joining the weight transfer", "the ranks of the link"):
            executor = join_session(session, self._rank, layout, store=self._tcp_store)
        self._links[session.key].executors[session.content] = executor

    def send_weights(
        self, key: str, version: int, contents: Sequence[str] = ("weights",)
    ) -> np.ndarray:
        """Send this rank's part of the weights; return the digests of its regions.

        Args:
            key: Key of the link.
            version: Weight version.
            contents: Sessions of the link to send in, in order.
        """
        link = self._links[key]
        with track_activity("weight transfer"):
            if not link.has_adapters:
                shards = {s.name: self._policy.parameter(s.name) for s in self.layout()}
                executor = link.executors["weights"]
                executor.send(shards, version, link.source_digests.make_copy_fn())
                return link.source_digests.compute(self._policy.parameter)
            for content in contents:
                layout = self.layout() if content == "weights" else self._policy.adapter_layout()
                shards = {s.name: self._policy.stored_parameter(s.name) for s in layout}
                link.executors[content].send(shards, version)
            # Parts of fused weights come one after the other, often of two weights in turn.
            return link.source_digests.compute(lru_cache(maxsize=2)(self._policy.parameter))

    def leave_weight_transfer(self, key: str) -> None:
        """Leave the sessions of a link; does nothing if this rank is in none."""
        if key in self._links:
            for executor in self._links.pop(key).executors.values():
                executor.close()


class PolicyGroup(RankGroup):
    """All policy ranks."""

    model_name = "policy"
    log_prefix = "policy"
    actor_class = PolicyActor

    def start(self) -> None:
        """Start all ranks and load the initial weights."""
        super().start()
        self.call_all("load_hf", self._config.model.path)

    def diagnose(self, error: RemoteCallError) -> Exception:
        """Return a `PolicyRankDiedError` if a rank is dead or silent, else the error."""
        found = super().diagnose(error)
        if not isinstance(found, ModelRankDiedError):
            return found
        return PolicyRankDiedError(str(found), found.operation, found.processes)

    def gpus_for_engine(self, engine: int) -> str:
        """Return the CUDA names of the GPUs that an engine shares with policy ranks."""
        size = self._config.engine.tensor_parallel_size
        return ",".join(filter(None, self.visible_gpus()[engine * size : (engine + 1) * size]))

    def _call_rank0(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0 alone and wait."""
        name = self.rank_name(0)
        call = self._actors[0].call.remote(method, *args)
        return self.gather(f"policy {method}", {name: call})[name]

    def submit(self, method: str, *args: Any) -> dict[str, Any]:
        """Start a method of all ranks; return object refs by rank name."""
        return self.submit_to_ranks("call", method, *args)

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the rendezvous store of the weight transfer on rank 0; return host and port."""
        name = self.rank_name(0)
        calls = {name: self._actors[0].open_store.remote(timeout_s)}
        address: tuple[str, int] = self.gather("store of the weight transfer", calls)[name]
        return address

    def compute_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with log-probs and entropies, each [B, T] float32.

        They are 0 in rows that are not to be scored. Reference log-probs are only computed if the
        objective needs them.
        """
        shards = self._sender.send_for_scoring(batch)
        logp_BT, entropy_BT = self._score(batch, shards, reference=False)
        batch = batch.with_fields(old_logp_BT=logp_BT, entropy_BT=entropy_BT)
        if self._config.model.router_replay is RouterReplay.old:
            batch = self._with_recorded_routes(batch)
        if self._config.algo.needs_reference:
            ref_logp_BT, _ = self._score(batch, shards, reference=True)
            batch = batch.with_fields(ref_logp_BT=ref_logp_BT)
        return batch

    def _score(
        self, batch: TrainBatch, shards: list[tuple[Any]], *, reference: bool
    ) -> tuple[torch.Tensor, ...]:
        answers = self.call_data_ranks("compute_log_probs", shards, reference)
        num_positions = batch.response_BT.size(1)
        return unpack_scores(answers, batch.length_B, num_positions, batch.is_scored_B)

    def _with_recorded_routes(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the routes that the ranks recorded in the log-prob pass."""
        parts = [part for answer in self.call_all("recorded_routes") for part in answer]
        moe = ModelShape.from_folder(self._config.model.path).moe
        if moe is None or not parts:
            return batch
        lengths = [
            len(prompt) + length
            for prompt, length in zip(batch.prompt_ids, batch.length_B.tolist(), strict=True)
        ]
        num_layers = sum(moe.moe_layer_pattern)
        return batch.with_fields(
            routes_B=merge_recorded_routes(parts, lengths, num_layers, moe.num_experts)
        )

    def update(
        self,
        batch: TrainBatch,
        kl_weight_BT: torch.Tensor | None = None,
        has_signal_B: torch.Tensor | None = None,
    ) -> UpdateStats:
        """Train on the batch and return the stats of rank 0.

        Args:
            batch: The batch with advantages.
            kl_weight_BT: [B, T] weight of each token's KL term; None for the configured
                coefficient.
            has_signal_B: [B] bool, False for rows to leave out, whose loss is 0; None to train on
                all rows.
        """
        given = batch
        if self._config.algo.old_log_probs is OldLogProbs.engine:
            given = batch.with_fields(old_logp_BT=batch.rollout_logp_BT)
        shards = self._sender.send_for_update(
            given,
            POLICY_TARGETS,
            str(self._config.algo.loss_aggregation),
            kl_weight_BT,
            has_signal_B,
        )
        stats: UpdateStats = self.call_data_ranks("update", shards)[0]
        metrics = {
            **stats.metrics,
            "load_imbalance": self._sender.load_imbalance,
            "num_spared_tokens": float(self._sender.num_spared_tokens),
        }
        scores = None if self._config.has_scoring_pass else self._update_scores(batch)
        return replace(stats, metrics=metrics, scores=scores)

    def _update_scores(self, batch: TrainBatch) -> UpdateScores:
        answers = [answer for answer in self.call_all("update_scores") if answer is not None]
        is_scored_B = torch.zeros_like(batch.length_B).bool()
        for answer in answers:
            is_scored_B[torch.from_numpy(answer.row_R.copy())] = True
        logp_BT, entropy_BT = unpack_scores(
            answers, batch.length_B, batch.response_BT.size(1), is_scored_B
        )
        return UpdateScores(logp_BT=logp_BT, entropy_BT=entropy_BT, is_scored_B=is_scored_B)

    def sft_step(self, batch: TrainBatch) -> UpdateStats:
        """Train on a batch of demonstrations and return the stats of rank 0."""
        shards = self._sender.send_demonstrations(batch)
        stats: UpdateStats = self.call_data_ranks("sft_step", shards)[0]
        return stats

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state on all ranks."""
        self.call_all("reset_optimizer")

    def set_objective(self, algo: AlgoConfig, temperature: float) -> None:
        """Set loss settings and sampling temperature on all ranks."""
        rollout = replace(self._config.rollout, temperature=temperature)
        self._config = replace(self._config, algo=algo, rollout=rollout)
        self.call_all("set_objective", algo, temperature)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint and return the extra values saved with it."""
        extra: dict[str, Any] = self.call_all("load_checkpoint", str(folder.resolve()))[0]
        return extra

    def start_profile(self) -> None:
        """Start a profiler trace on rank 0."""
        self._call_rank0("start_profile")

    def stop_profile(self, file: Path) -> None:
        """Stop the trace on rank 0 and write it to a file."""
        self._call_rank0("stop_profile", str(file.resolve()))

    def gpu_name(self) -> str:
        """Return the CUDA name of the policy's GPUs; empty on CPUs."""
        return str(self._call_rank0("gpu_name"))

    def kernels(self) -> str:
        """Return the kernels that rank 0 computes with, as one line."""
        return str(self._call_rank0("kernels"))

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self.call_all("export_hf", str(folder))
