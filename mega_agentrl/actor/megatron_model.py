"""One rank's shard of a Megatron model: weights, passes over a batch, optimizer steps.

`MegatronModel` holds what policy, critic and reward model share; each of them adds an output
head and an objective. Every rank of the parallel layout creates one `MegatronModel` and calls
the same methods in the same order, each with the rows of its data-parallel rank
(`batch.row_sharding`), which it processes with its pipeline stage and tensor shard.

To add a role: a head in `model.heads`, an objective (`training.objectives`) if it is trained, a
class like `critic.CriticRank` whose arguments and results are plain values or numpy arrays, a group
of its ranks in `runtime.workers`; a test against one process, as `tests/actor/test_critic.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mega_agentrl.actor import device
from mega_agentrl.actor.checkpoint import save_load
from mega_agentrl.actor.checkpoint.hf_export import export_hf_folder
from mega_agentrl.actor.checkpoint.peft_folder import read_peft_folder
from mega_agentrl.actor.megatron_compat import init_device
from mega_agentrl.actor.model.gpt_model import (
    build_model_chunks,
    check_parameter_shapes,
    release_moe_routing_graph,
    set_grad_sync_flags,
    wrap_with_ddp,
)
from mega_agentrl.actor.model.lora import attach_adapters, init_adapters
from mega_agentrl.actor.model.route_replay import router_part
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.actor.training.offload import Offloader, require_on_device
from mega_agentrl.actor.training.optimizer import AdamOptimizer
from mega_agentrl.actor.training.packing import MicroBatch, pack_rows, selected_tokens
from mega_agentrl.actor.training.pipeline_schedule import PipelineSchedule
from mega_agentrl.actor.training.step_result import NO_ROUTES, RouteTotals, StepResult
from mega_agentrl.batch.packed_rows import PackedScores
from mega_agentrl.config.enums import LrSchedule
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.mapping.lora_layout import is_lora_param, lora_shapes, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import (
    hf_shapes,
    is_vision_param,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape
from mega_agentrl.types.activity import track_activity
from mega_agentrl.types.routes import DIGEST_BITS
from mega_agentrl.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence, Set

    from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, FileRecord
    from mega_agentrl.actor.model.gpt_model import GPTModelChunk
    from mega_agentrl.actor.model.heads import OutputHead
    from mega_agentrl.actor.model.lora import LoraWeight
    from mega_agentrl.actor.model.route_replay import RouteLog
    from mega_agentrl.actor.training.pipeline_schedule import MicroBatchStats, Objective
    from mega_agentrl.batch.packed_rows import PackedRows
    from mega_agentrl.batch.row_sharding import MicroPlan
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.policy import LoraConfig, OptimConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.types.routes import RecordedRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank of this process and how it joins `torch.distributed`."""

    rank: int
    world_size: int
    master_address: str
    """Host of rank 0."""
    master_port: int
    timeout_s: float
    """Longest wait for all ranks at the start and in every collective."""
    num_threads: int = 1
    """CPU threads of a torch operation."""


class MegatronModel:
    """This process's shard of the model; its weights are undefined until `load_hf`.

    With `is_trainable=False` the weights are frozen: there are no gradient buffers and no
    optimizer, and `train_step` must not be called. With `lora` the weights have adapters, which are
    trained in their place. With `exact` a dense text model on CPUs computes with `numerics`.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        rank_info: RankInfo,
        *,
        is_trainable: bool = True,
        lora: LoraConfig | None = None,
        exact: bool = False,
    ) -> None:
        self.config = config
        self.shape = shape
        self.lora = lora
        coordinates = process_groups.RankCoordinates.from_rank(rank_info.rank, config.parallel)
        self.shard_layouts = megatron_layout(
            shape, coordinates.model_parallel_rank, fused=device.has_transformer_engine()
        )
        """The weights of this rank, without adapters."""
        self.adapter_layouts: list[ShardLayout] = []
        """The parameters of the adapters."""
        torch.set_num_threads(rank_info.num_threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        init_device(rank_info.rank)
        self.groups = process_groups.init_process_groups(
            config.parallel,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            master_address=rank_info.master_address,
            master_port=rank_info.master_port,
            timeout_s=rank_info.timeout_s,
        )
        self.dtype = device.resolve_train_dtype(config.model.dtype)
        chunks = build_model_chunks(
            shape,
            self.groups,
            config.parallel,
            self.dtype,
            tree_attention=config.model.tree_attention,
            image_processor=ImageProcessor(config.model.path) if shape.vision else None,
            exact=exact,
            options=config.model.megatron,
        )
        self.is_exact = exact
        self._adapters = {} if lora is None else self._attach_adapters(chunks, lora)
        check_parameter_shapes(chunks, [*self.shard_layouts, *self.adapter_layouts])
        # The keys are the names in `shard_layouts` and `adapter_layouts`.
        self.parameters = {
            f"{coordinates.model_parallel_rank.param_prefix(number)}{name}": parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        for name, parameter in self.parameters.items():
            frozen = config.model.freeze_vision and is_vision_param(name)
            if lora is not None:
                frozen = not is_lora_param(name)
            parameter.requires_grad_(is_trainable and not frozen)
        self.chunks = wrap_with_ddp(chunks, self.groups, config.parallel)
        self._optimizer = self._build_optimizer() if is_trainable else None
        self.num_steps, self.max_micro_batch_tokens = 0, 0
        self.hf_source_folder = Path(config.model.path)
        self.offloader = Offloader(self.chunks, self._optimizer)
        self.checkpoint_writer = save_load.CheckpointWriter()
        self._pipeline_schedule = PipelineSchedule(self.chunks, self.groups)
        self._route_logs: list[RouteLog] = []

    def _attach_adapters(
        self, chunks: Sequence[GPTModelChunk], lora: LoraConfig
    ) -> dict[str, LoraWeight]:
        if device.has_transformer_engine():
            raise ConfigError(
                "model.lora.rank",
                lora.rank,
                "0 with Transformer Engine, whose layers cannot have adapters yet",
                "an environment made with WITH_TE=1",
            )
        self.adapter_layouts = lora_shards(self.shard_layouts, lora.rank, lora.targets)
        adapters = attach_adapters(chunks, self.shard_layouts, lora, self.dtype, self.groups)
        for chunk in chunks:
            sequence = self.config.parallel.sequence_parallel
            set_grad_sync_flags(chunk, self.shape, sequence=sequence)
        return adapters

    @property
    def state_layouts(self) -> list[ShardLayout]:
        """The parameters that a checkpoint has: all weights, or those of the adapters."""
        return self.shard_layouts if self.lora is None else self.adapter_layouts

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of the tensors that a checkpoint has, by Hugging Face name."""
        shapes = hf_shapes(self.shape)
        lora = self.lora
        return shapes if lora is None else lora_shapes(shapes, lora.rank, lora.targets)

    def merged_weight(self, name: str) -> torch.Tensor:
        """Return the weight `name` of `shard_layouts`, with its adapters if it has any."""
        weight = self.parameters[name].detach()
        if name not in self._adapters:
            return weight
        return self._adapters[name].merged(weight)

    @property
    def is_trainable(self) -> bool:
        """Whether the model has an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> AdamOptimizer:
        """The optimizer of a trainable model."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer

    def load_hf(self, folder: str, *, fresh: Collection[str] = ()) -> None:
        """Load this rank's slices of a Hugging Face checkpoint and reset the optimizer.

        A model with a scalar head also accepts the checkpoint of a policy.

        Args:
            folder: Hugging Face folder of a model of the same shape.
            fresh: Names of Hugging Face tensors that are set to 0 if the folder lacks them.

        Raises:
            ValueError: If the model in the folder has another shape.
        """
        self.load_parameters(folder, fresh=fresh)
        self.hf_source_folder = Path(folder)
        if self.lora is not None and self.lora.path:
            read_peft_folder(self.lora, self.adapter_layouts, self.state_shapes, self.parameters)
        else:
            init_adapters(
                self.adapter_layouts, self.state_shapes, self.parameters, self.config.seed
            )
        if self._optimizer is not None:
            self._optimizer.reload_master_weights()
            self.reset_optimizer()

    def load_parameters(self, folder: str, *, fresh: Collection[str] = ()) -> None:
        """Load this rank's slices of a checkpoint into the parameters and nothing else.

        Arguments and errors are those of `load_hf`.
        """
        shape = ModelShape.from_folder(folder)
        if self.shape.head is HeadKind.scalar:
            shape = shape.with_scalar_head()
        if shape != self.shape:
            raise InputError(
                f"shape of {folder}",
                shape,
                f"{self.shape}, which the ranks were built for",
                "another model than model.path names",
            )
        for shard in self.shard_layouts:
            if any(block.hf_name in fresh for block in shard.blocks):
                self.parameters[shard.name].detach().zero_()
        read_shards(folder, self.shard_layouts, hf_shapes(shape), self.parameters, fresh=fresh)

    def reset_optimizer(self) -> None:
        """Reset Adam's moments and step count and restart the learning rate schedule."""
        self.optimizer.reset()
        self.num_steps = 0

    def forward_only(
        self,
        rows: PackedRows,
        plan: MicroPlan,
        head: OutputHead,
        select_M: np.ndarray | None = None,
        *,
        record_routes: bool = False,
    ) -> PackedScores | None:
        """Apply the head to the rows of this data-parallel rank, without gradients.

        Args:
            rows: The rows of the data rank.
            plan: The micro-batches of these rows.
            head: Maps hidden states to the tensors that are returned.
            select_M: `[M]` bool, the response tokens to evaluate; None for all.
            record_routes: Whether to keep the routes of the tokens for `recorded_routes`.

        Returns:
            The head's values of these tokens. One rank of the last pipeline stage of each
            data-parallel rank returns them, all others None.
        """
        if select_M is None:
            select_M = np.ones(rows.response_start_R1[-1], dtype=bool)
        micros = self._build_micro_batches(rows, plan, select_M, record_routes=record_routes)
        outputs = self._pipeline_schedule.forward_only(micros, head)
        self._sum_routes(micros)
        self._route_logs = [micro.route_log for micro in micros if micro.route_log is not None]
        return self._gather_scores(rows, micros, select_M, outputs)

    def _gather_scores(
        self,
        rows: PackedRows,
        micros: Sequence[MicroBatch],
        select_M: np.ndarray,
        outputs: Sequence[tuple[torch.Tensor, ...]],
    ) -> PackedScores | None:
        """Return the outputs of a pass, `[R, T]` by micro-batch, as `forward_only` does."""
        coordinates = self.groups.coordinates
        if not coordinates.is_last_stage or coordinates.model_parallel_rank.tensor_rank:
            return None
        places = [selected_tokens(rows, micro.rows, select_M) for micro in micros]
        values = [
            torch.cat([value_RT[place] for value_RT, place in zip(parts, places, strict=True)])
            for parts in zip(*outputs, strict=True)
        ]
        if coordinates.context_size > 1:
            with track_activity("sum of the scores", self.groups.describe_peers("context")):
                for value in values:
                    dist.all_reduce(value, group=self.groups.pg_collection.cp)
        if coordinates.context_rank:
            return None
        return PackedScores(
            row_R=rows.row_R[[index for micro in micros for index in micro.rows]],
            values=tuple(value.cpu().numpy() for value in values),
        )

    def train_step(
        self,
        rows: PackedRows,
        plan: MicroPlan,
        mask_M: np.ndarray,
        head: OutputHead,
        objective: Objective,
        names: Sequence[str],
        *,
        lr: float | None = None,
        keep_scores: bool = False,
    ) -> StepResult:
        """Take one optimizer step.

        Args:
            rows: The rows of the data rank.
            plan: The micro-batches of the step.
            mask_M: `[M]` bool, the trained tokens of all of `rows`.
            head: Maps hidden states to the inputs of the objective.
            objective: Loss and metrics of a micro-batch.
            names: Metrics of the objective to sum over micro-batches and ranks.
            lr: Learning rate; replaces the schedule's.
            keep_scores: Whether the result has the head's values of the trained tokens.
        """
        micros = self._build_micro_batches(rows, plan, mask_M)
        self.max_micro_batch_tokens = max(
            self.max_micro_batch_tokens, *(len(micro.token_S) for micro in micros)
        )
        self.optimizer.zero_grad()
        outputs: list[tuple[torch.Tensor, ...]] | None = [] if keep_scores else None
        stats = self._pipeline_schedule.forward_backward(micros, head, objective, outputs)
        scores = None
        if outputs is not None:
            every_M = np.ones(rows.response_start_R1[-1], dtype=bool)
            scores = self._gather_scores(rows, micros, every_M, outputs)
        routes = self._sum_routes(micros)
        lr = self._current_learning_rate() if lr is None else lr
        with track_activity("optimizer step", self.groups.describe_peers("all")):
            norm, applied = self.optimizer.step(lr)
        self.num_steps += applied
        with track_activity("sum of the metrics", self.groups.describe_peers("data", "pipeline")):
            sums = self._reduce_metrics(stats, ("loss", "num_tokens", *names))
        return StepResult(
            metric_sums=sums,
            grad_norm=norm,
            learning_rate=lr,
            applied=applied,
            routes=routes,
            scores=scores,
        )

    def recorded_routes(self) -> list[RecordedRoutes]:
        """Return what `forward_only` has recorded in the micro-batches of its last pass.

        Tensor ranks that see the same tokens as another return nothing.
        """
        is_split = self.config.parallel.sequence_parallel
        if self.groups.coordinates.model_parallel_rank.tensor_rank and not is_split:
            return []
        part = router_part(self.groups, is_split=is_split)
        return [log.recorded(part) for log in self._route_logs if log.chosen_RK]

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder.

        Configuration and tokenizer are copied from the folder that was loaded. The gradient
        buffers are freed during the export, to make room for the blocks that the ranks send.
        """
        require_on_device("export", {"weights"}, self.offloader.on_host)
        has_gradients = "gradients" not in self.offloader.on_host
        self.offloader.to_host(weights=False, optimizer=False)
        with track_activity("writing of the model", self.groups.describe_peers("all")):
            export_hf_folder(Path(folder), self)
        self.offloader.to_device(weights=False, gradients=has_gradients, optimizer=False)

    def close(self) -> None:
        """Abandon a running save and destroy the process groups; safe to call twice."""
        self.checkpoint_writer.abandon()
        release_moe_routing_graph(self.chunks)
        process_groups.destroy_process_groups()

    def _build_optimizer(self) -> AdamOptimizer:
        return AdamOptimizer(
            self.chunks,
            self.groups,
            self.config.optim,
            self.dtype,
            distributed=self.config.parallel.distributed_optimizer,
        )

    def _current_learning_rate(self) -> float:
        optim = self.config.optim
        return compute_learning_rate(
            self.num_steps, optim, self.config.total_steps * optim.num_minibatches
        )

    def _build_micro_batches(
        self,
        rows: PackedRows,
        plan: MicroPlan,
        select_M: np.ndarray,
        *,
        record_routes: bool = False,
    ) -> list[MicroBatch]:
        coordinates, parallel = self.groups.coordinates, self.config.parallel
        target_device = device.current_device()
        return [
            pack_rows(
                rows,
                indices,
                select_M,
                target_device,
                multiple=parallel.tensor if parallel.sequence_parallel else 1,
                context_rank=coordinates.context_rank,
                context_size=coordinates.context_size,
                has_images=self.shape.vision is not None,
                is_recording=record_routes,
            )
            for indices in plan
        ]

    def _sum_routes(self, micros: Sequence[MicroBatch]) -> RouteTotals:
        """Return what the routers of all ranks did in a pass, after checking the digests.

        Raises:
            RuntimeError: The experts that the routers used are not those that came with the rows.
        """
        if self.shape.moe is None:
            return NO_ROUTES
        groups, coordinates = self.groups, self.groups.coordinates
        is_split = self.config.parallel.sequence_parallel
        rank = coordinates.model_parallel_rank
        # Pairs, replayed and differing ones, digests used and digests expected.
        total = torch.zeros(5, dtype=torch.int64, device=device.current_device())
        for log in (micro.route_log for micro in micros):
            if log is None:
                continue
            for count in log.counts.values():
                total[1:4] += count
            if not (is_split and rank.tensor_rank):
                total[0] += log.num_tokens * len(log.counts)
                total[4] += 0 if rank.pipeline_rank else log.expected_digest
        peers = groups.describe_peers("data", "pipeline", *(["tensor"] if is_split else []))
        with track_activity("sum of the routes", peers):
            collection = groups.pg_collection
            for group in (collection.dp_cp, collection.pp, *([collection.tp] if is_split else [])):
                if group.size() > 1:
                    dist.all_reduce(total, group=group)
        num_pairs, num_replayed, num_differing, used, expected = total.tolist()
        if (used - expected) % 2**DIGEST_BITS:
            raise RuntimeError(
                f"model.router_replay: the experts of {num_replayed} pairs of a token and a layer "
                f"have the digest {used % 2**DIGEST_BITS}, expected "
                f"{expected % 2**DIGEST_BITS}, which came with the rollouts; probable cause: "
                "routes of other tokens, or an engine with another model"
            )
        return RouteTotals(num_pairs, num_replayed, num_differing)

    def _reduce_metrics(
        self, stats: list[MicroBatchStats], names: Sequence[str]
    ) -> dict[str, float]:
        """Sum metrics over micro-batches and data ranks; every pipeline stage gets them."""
        total = torch.zeros(len(names), device=device.current_device())
        for micro_stats in stats:
            total += torch.stack([micro_stats[name].float() for name in names])
        if self.groups.pg_collection.dp_cp.size() > 1:
            dist.all_reduce(total, group=self.groups.pg_collection.dp_cp)
        if self.groups.pg_collection.pp.size() > 1:
            dist.broadcast(total, self.groups.last_stage_rank, group=self.groups.pg_collection.pp)
        return dict(zip(names, total.tolist(), strict=True))


class TrainableRank:
    """Base class of policy and critic, which saves, loads and closes their `megatron_model`."""

    megatron_model: MegatronModel

    def start_save(self, folder: str) -> CheckpointManifest:
        """Start to write the training state to an empty folder (`CheckpointWriter.start`)."""
        return self.megatron_model.checkpoint_writer.start(self.megatron_model, Path(folder))

    def save_result(self, wait_s: float) -> dict[str, FileRecord] | None:
        """Return the files that this rank has written (`CheckpointWriter.result`)."""
        return self.megatron_model.checkpoint_writer.result(wait_s)

    def abandon_save(self) -> None:
        """End the running save, if there is one."""
        self.megatron_model.checkpoint_writer.abandon()

    def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Load a checkpoint written under any parallel layout and return its `extra` values."""
        return save_load.load_checkpoint(self.megatron_model, folder)

    def set_gpu_resident(self, parts: Set[str]) -> None:
        """Keep exactly these parts of the state on the device (`Offloader.keep_on_device`)."""
        self.megatron_model.offloader.keep_on_device(parts)

    def close(self) -> None:
        """Destroy the process groups; safe to call twice."""
        self.megatron_model.close()


def compute_learning_rate(step: int, settings: OptimConfig, total_steps: int) -> float:
    """Compute the learning rate of optimizer step `step`, counted from 0.

    With W warm-up steps and a run of D steps:

        step < W    lr * (step + 1) / W             linear warm-up
        else        x = (step - W) / (D - W), 1 after D
          constant  lr
          linear    min_lr + (lr - min_lr) * (1 - x)
          cosine    min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2     (arXiv:1608.03983, eq. 5)

    Megatron's `OptimizerParamScheduler` cannot compute these values: with settings that give this
    warm-up, its decay is one step ahead, (step + 1 - W) in place of (step - W).

    Raises:
        ValueError: If `step` is negative or `total_steps`, the optimizer steps of the whole
            run, is below 1.
    """
    if step < 0 or total_steps < 1:
        raise InputError(
            "step and total_steps", (step, total_steps), "at least 0 and 1", "a run of 0 steps"
        )
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    if settings.lr_schedule == LrSchedule.constant:
        return settings.lr
    progress = 1.0
    if step < total_steps:
        progress = (step - settings.lr_warmup_steps) / (total_steps - settings.lr_warmup_steps)
    if settings.lr_schedule == LrSchedule.linear:
        decay = 1.0 - progress
    else:
        decay = (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.min_lr + (settings.lr - settings.min_lr) * decay
