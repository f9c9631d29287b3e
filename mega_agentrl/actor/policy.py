"""One Megatron rank of the policy: scoring, policy updates, SFT steps, the frozen reference.

Arguments and results are plain values or arrays in host memory, so that a remote call can carry
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from mega_agentrl.actor import device
from mega_agentrl.actor.kernels import describe_kernels
from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo, TrainableRank
from mega_agentrl.actor.model.gpt_model import make_vocab_shard
from mega_agentrl.actor.model.heads import LogProbHead
from mega_agentrl.actor.training.losses import find_loss
from mega_agentrl.actor.training.objectives import (
    SFT_METRICS,
    PolicyObjective,
    SftObjective,
    policy_metrics,
    require_targets,
)
from mega_agentrl.actor.training.offload import ReferenceWeights, require_on_device
from mega_agentrl.actor.training.step_result import StepResult, route_metrics, summarize_steps
from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.batch.row_sharding import RowSharder
from mega_agentrl.config.enums import RouterReplay
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import PROCESS_MEMORY
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.types.atomic_file import atomic_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from mega_agentrl.batch.packed_rows import PackedScores
    from mega_agentrl.batch.row_sharding import ScoringShard, UpdateShard
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.types.batch import UpdateStats
    from mega_agentrl.types.routes import RecordedRoutes


class PolicyRank(TrainableRank):
    """This process's shard of the policy; its weights are undefined until `load_hf`.

    Checkpoints do not contain the reference; `load_hf` and `set_objective` create it.
    """

    def __init__(self, config: TrainConfig, rank_info: RankInfo) -> None:
        self._config = config
        # Import a user's loss now, so that a missing file is an error before the first update.
        find_loss(config.algo)
        shape = ModelShape.from_folder(config.model.path)
        if config.model.zero_mismatch and device.has_cuda():
            raise ConfigError(
                "model.zero_mismatch",
                True,
                "False on GPUs, where vLLM's kernels have not been replaced",
                "the settings of a run on CPUs",
            )
        self.megatron_model = MegatronModel(
            config,
            shape,
            rank_info,
            is_trainable=not config.is_eval_only,
            lora=config.model.lora if config.model.lora.rank else None,
            exact=config.model.zero_mismatch,
        )
        self._vocab_shard = make_vocab_shard(
            shape, self.megatron_model.groups, exact=config.model.zero_mismatch
        )
        self._reference: ReferenceWeights | None = None
        self._update_scores: PackedScores | None = None
        self._profiler = StepProfiler()

    def load_hf(self, folder: str) -> None:
        """Load this rank's slices of a Hugging Face checkpoint and reset the optimizer.

        If the objective needs a reference, the loaded weights or those of `model.reference_path`
        become the reference, except in a run that only evaluates.
        """
        self.megatron_model.load_hf(folder)
        if self._config.algo.needs_reference and self.megatron_model.is_trainable:
            self.snapshot_reference()

    def snapshot_reference(self) -> None:
        """Copy the current weights to host memory as the reference of the KL term.

        If `model.reference_path` is set, that model is the reference instead, and is only loaded
        if there is no reference yet.
        """
        reference_path = self._config.model.reference_path
        if reference_path and self._reference is not None:
            return
        if reference_path:
            self._reference = ReferenceWeights(self.megatron_model.parameters.values())
            with self._reference.swapped_in():
                self.megatron_model.load_parameters(reference_path)
        elif self._reference is None:
            # Weights below adapters are those of the reference, too.
            model = self.megatron_model
            self._reference = ReferenceWeights(
                [model.parameters[shard.name] for shard in model.state_layouts]
            )
        else:
            self._reference.snapshot()

    def set_objective(self, algo: AlgoConfig, temperature: float) -> None:
        """Switch to another objective and sampling temperature.

        If the objective needs a reference, the current weights become the reference, unless
        `model.reference_path` is set.
        """
        rollout = replace(self._config.rollout, temperature=temperature)
        self._config = replace(self._config, algo=algo, rollout=rollout)
        if algo.needs_reference:
            self.snapshot_reference()
        else:
            self._reference = None

    def reset_optimizer(self) -> None:
        """Reset Adam's moments, the step count and the learning rate schedule.

        If there is a reference, the current weights replace it, unless `model.reference_path` is
        set.
        """
        self.megatron_model.reset_optimizer()
        if self._reference is not None:
            self.snapshot_reference()

    def compute_log_probs(
        self, shard: ScoringShard, reference: bool = False
    ) -> PackedScores | None:
        """Compute log-prob and entropy of every response token at `rollout.temperature`.

        The current weights replay the routes of the rows; with `model.router_replay=old` the routes
        that they choose are kept for `recorded_routes`. The reference weights use their own.

        Args:
            shard: The rows of this data rank.
            reference: Score with the reference weights instead of the current ones.

        Returns:
            Log-probs and entropies (nats). One rank of the last pipeline stage of each
            data-parallel rank returns them, all others None.

        Raises:
            ValueError: If `reference` is set and there is no reference.
        """
        if reference:
            with self._reference_swapped_in():
                rows = replace(shard.rows, routes=None)
                head = self._log_prob_head(rows, self._temperature)
                return self.megatron_model.forward_only(rows, shard.micros, head)
        head = self._log_prob_head(shard.rows, self._temperature)
        record_routes = (
            self._config.model.router_replay is RouterReplay.old
            and self.megatron_model.shape.moe is not None
        )
        return self.megatron_model.forward_only(
            shard.rows, shard.micros, head, record_routes=record_routes
        )

    def recorded_routes(self) -> list[RecordedRoutes]:
        """Return the routes that this rank chose in the last `compute_log_probs`, if recorded."""
        return self.megatron_model.recorded_routes()

    def compute_prompt_log_probs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Compute the log-probs of a prompt's tokens after the first, at temperature 1.

        Every data-parallel rank scores the same row. One rank of the last pipeline stage of
        data-parallel rank 0 returns the log-probs, all others None.
        """
        rows = PackedRows.from_sequences(
            [np.array(token_ids, dtype=np.int32)],
            row_R=np.zeros(1, dtype=np.int64),
            prompt_lengths=[1],
            num_positions=len(token_ids) - 1,
        )
        sharder = replace(RowSharder.from_config(self._config), num_data=1)
        (shard,) = sharder.scoring_shards(rows)
        scores = self.megatron_model.forward_only(
            rows, shard.micros, self._log_prob_head(rows, 1.0)
        )
        if scores is None or self.megatron_model.groups.coordinates.data_rank:
            return None
        logps: list[float] = scores.values[0].tolist()
        return logps

    def update_scores(self) -> PackedScores | None:
        """Return log-probs and entropies of the rows of the last update's first optimizer step.

        They are those before the step, 0 for tokens that are not trained on. Only without
        `TrainConfig.has_scoring_pass`, and on the ranks that return `compute_log_probs`.
        """
        return self._update_scores

    def update(
        self, shard: UpdateShard, scored: ScoringShard | None = None, lr: float | None = None
    ) -> UpdateStats:
        """Take the optimizer steps of the shard on the policy loss.

        Args:
            shard: Rows, old log-probs and advantages of this data rank.
            scored: The shard that `compute_log_probs` was given for the same batch; None if it was
                not called.
            lr: Learning rate; replaces the schedule of `optim`.
        """
        rows = shard.gather_rows(scored)
        head = self._log_prob_head(rows, self._temperature)
        metrics = policy_metrics(self._config.algo)
        if len(shard.steps) > 1:
            require_targets(shard.targets, ["old_logp"], "update", "compute_log_probs")
        results: list[StepResult] = []
        for step in shard.steps:
            objective = PolicyObjective(self._config.algo, shard.targets, step.denominator)
            results.append(
                self.megatron_model.train_step(
                    rows,
                    step.micros,
                    shard.targets.mask_M,
                    head,
                    objective,
                    metrics,
                    lr=lr,
                    keep_scores=not (results or self._config.has_scoring_pass),
                )
            )
        self._update_scores = results[0].scores if results else None
        stats = summarize_steps(results, metrics)
        return replace(stats, metrics={**stats.metrics, **route_metrics(results)})

    def sft_step(self, shard: UpdateShard, lr: float | None = None) -> UpdateStats:
        """Take one step on the mean negative log-prob of the masked tokens, at temperature 1.

        The learning rate is `sft.lr` unless `lr` is given; the schedule of `optim` applies to
        `update` only.
        """
        rows = shard.gather_rows(None)
        head = self._log_prob_head(rows, 1.0)
        lr = self._config.sft.lr if lr is None else lr
        results = [
            self.megatron_model.train_step(
                rows,
                step.micros,
                shard.targets.mask_M,
                head,
                SftObjective(shard.targets, step.denominator),
                SFT_METRICS,
                lr=lr,
            )
            for step in shard.steps
        ]
        return summarize_steps(results, SFT_METRICS)

    def layout(self) -> list[ShardLayout]:
        """Return the layout of every parameter of this rank."""
        return list(self.megatron_model.shard_layouts)

    def adapter_layout(self) -> list[ShardLayout]:
        """Return the layout of every factor of this rank's adapters; empty without adapters."""
        return list(self.megatron_model.adapter_layouts)

    def parameter(self, name: str) -> torch.Tensor:
        """Return this rank's tensor of the shard `name` of `layout`.

        It is a copy if the weight has adapters, which are merged into it.

        Raises:
            ValueError: If the weights are in host memory.
        """
        require_on_device("sending weights", {"weights"}, self.megatron_model.offloader.on_host)
        return self.megatron_model.merged_weight(name)

    def stored_parameter(self, name: str) -> torch.Tensor:
        """Return this rank's tensor of a shard of `layout` or `adapter_layout`, without merging.

        Raises:
            ValueError: If the weights are in host memory.
        """
        require_on_device("sending weights", {"weights"}, self.megatron_model.offloader.on_host)
        return self.megatron_model.parameters[name].detach()

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder.

        Configuration and tokenizer are copied from the folder that was loaded.
        """
        self.megatron_model.export_hf(folder)

    def start_profile(self) -> None:
        """Start a profiler trace of this rank."""
        self._profiler.start()

    def stop_profile(self, file: str) -> None:
        """Stop the trace and write it as a Chrome trace; `ValueError` if none was started."""
        self._profiler.stop(Path(file))

    def gpu_name(self) -> str:
        """Return CUDA's name of this rank's GPU, or an empty string on a CPU."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def kernels(self) -> str:
        """Return the names of the kernels that the model computes with, as one line."""
        return describe_kernels(self.megatron_model)

    def memory_stats(self) -> dict[str, float]:
        """Return the peak memory and the size of the largest training micro-batch.

        Returns:
            `micro_batch_tokens`, the tokens of the largest micro-batch, and `peak_mib`, the peak of
            the memory that torch reserved on the GPU, or of this process's host memory on a CPU.
            On a CPU also `libraries_mib`, the memory that was in use before the model was built;
            it is not part of `peak_mib`.
        """
        stats = {"micro_batch_tokens": float(self.megatron_model.max_micro_batch_tokens)}
        if torch.cuda.is_available():
            return stats | {"peak_mib": torch.cuda.max_memory_reserved() / MIB}
        return stats | {
            "peak_mib": PROCESS_MEMORY.peak_mib(),
            "libraries_mib": PROCESS_MEMORY.libraries_mib(),
        }

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature

    def _log_prob_head(self, rows: PackedRows, temperature: float) -> LogProbHead:
        return LogProbHead(
            temperature=temperature,
            vocab_shard=self._vocab_shard,
            num_positions=rows.num_positions,
        )

    def _reference_swapped_in(self) -> AbstractContextManager[None]:
        if self._reference is None:
            raise InputError(
                "reference of the log-probs",
                None,
                "a model, with algo.kl_coef above 0 or algo.ares.mode other than off, or after "
                "snapshot_reference()",
            )
        return self._reference.swapped_in()


class StepProfiler:
    """Records traces of one rank between two calls with torch's profiler.

    Shapes, stacks and memory are not recorded, because they multiply the size and cost of a trace.
    """

    def __init__(self) -> None:
        self._profiler: profile | None = None

    def start(self) -> None:
        """Start a trace; an unfinished trace of a failed step is dropped."""
        self._discard()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def stop(self, file: Path) -> None:
        """Stop the trace and write it atomically as a Chrome trace.

        Raises:
            ValueError: If no trace was started.
        """
        if self._profiler is None:
            raise InputError(
                f"trace for {file}",
                None,
                "one, from start_profile() before stop_profile()",
                "the rank was restarted in between",
            )
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        with atomic_path(file) as temporary:
            profiler.export_chrome_trace(str(temporary))

    def _discard(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
