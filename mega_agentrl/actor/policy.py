"""One rank of the policy: load, score, update, export.

Every rank of the layout makes one `PolicyRank` and calls the same methods in the same order
with the same batch; each works on its data share, its stage and its tensor shard. Values in
and out are plain or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mega_agentrl.actor import device, groups
from mega_agentrl.actor.export import export_folder
from mega_agentrl.actor.loss import (
    POLICY_METRICS,
    SUPERVISED_METRICS,
    PolicyObjective,
    SupervisedObjective,
)
from mega_agentrl.actor.model import build_model, check_layout, vocab_shard, wrap_data_parallel
from mega_agentrl.actor.optimizer import PolicyOptimizer
from mega_agentrl.actor.packing import MicroBatch, pack_rows, row_lengths
from mega_agentrl.actor.schedule import Head, Schedule
from mega_agentrl.batch.balance import plan_micro_batches
from mega_agentrl.reshard.checkpoint import read_shards
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.types.batch import UpdateStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.actor.loss import Objective, Share
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.types.batch import TrainBatch


class PolicyRank:
    """One process's part of the policy; weights are undefined until `load`."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        timeout_s: float,
    ) -> None:
        self._config = config
        self._shape = ModelShape.from_folder(config.model.path)
        position = groups.Position.of(rank, config.parallel)
        self._layout = megatron_layout(
            self._shape,
            tensor_rank=position.tensor_rank,
            tensor_size=position.tensor_size,
            pipeline_rank=position.pipeline_rank,
            pipeline_size=position.pipeline_size,
        )
        torch.set_num_threads(config.parallel.threads)
        device.choose_device(rank)
        self._groups = groups.join(
            config.parallel,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=timeout_s,
        )
        model = build_model(self._shape, self._groups)
        check_layout(model, self._layout)
        self._parameters = dict(model.named_parameters())
        wrapped = wrap_data_parallel(model, self._groups)
        self._schedule = Schedule(wrapped, self._groups)
        self._optimizer = PolicyOptimizer(wrapped, self._groups, config.optim)
        self._shard = vocab_shard(self._shape, self._groups)
        self._source = Path(config.model.path)
        self._reference: dict[str, torch.Tensor] | None = None

    def load(self, folder: str) -> None:
        """Read this rank's slices of a checkpoint of the same shape; moments start anew.

        With algo.kl_coef > 0 the loaded weights become the reference as well.
        """
        shape = ModelShape.from_folder(folder)
        if shape != self._shape:
            raise ValueError(
                f"load {folder}: shape {shape} differs from {self._shape} of "
                f"model.path={self._config.model.path}"
            )
        read_shards(folder, self._layout, hf_shapes(shape), self._parameters)
        self._source = Path(folder)
        self._optimizer.reload()
        self._optimizer.reset()
        if self._config.algo.kl_coef > 0:
            self.freeze_reference()

    def freeze_reference(self) -> None:
        """Keep a copy of the current weights as the reference of the KL term."""
        self._reference = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments; with a KL term, the reference starts here too."""
        self._optimizer.reset()
        if self._reference is not None:
            self.freeze_reference()

    def logprobs(
        self, batch: TrainBatch, reference: bool = False
    ) -> tuple[list[int], torch.Tensor, torch.Tensor] | None:
        """Log-prob and entropy of every response token, at rollout.temperature.

        Returns the rows of this rank's data share and their [rows, T] float32 log-probs and
        entropies, 0 after a row's end; on tensor rank 0 of the last stage, else None.
        """
        width = batch.response_BT.size(1)
        select_BT = torch.arange(width)[None, :] < batch.length_B[:, None]
        micros = self._micro_batches(batch, range(batch.num_rows), select_BT)
        if reference:
            self._swap_reference()
        try:
            scores = self._schedule.score(micros, self._head(width, self._temperature))
        finally:
            if reference:
                self._swap_reference()
        position = self._groups.position
        if not position.last_stage or position.tensor_rank:
            return None
        rows = [row for micro in micros for row in micro.rows]
        logp_BT = torch.cat([logp_RT for logp_RT, _ in scores]).cpu()
        entropy_BT = torch.cat([entropy_RT for _, entropy_RT in scores]).cpu()
        return rows, logp_BT, entropy_BT

    def update(
        self,
        batch: TrainBatch,
        kl_weight_BT: torch.Tensor | None = None,
        lr: float | None = None,
    ) -> UpdateStats:
        """optim.num_minibatches clipped policy-gradient steps over the batch, in row order.

        kl_weight_BT: [B, T] weight of the KL term per token, instead of algo.kl_coef.
        """
        lr = self._config.optim.lr if lr is None else lr
        num_steps = max(1, min(self._config.optim.num_minibatches, batch.num_rows))
        ends = [batch.num_rows * step // num_steps for step in range(num_steps + 1)]
        results = []
        for start, stop in pairwise(ends):
            mask_BT = batch.mask_BT.clone().bool()
            mask_BT[:start] = False
            mask_BT[stop:] = False
            objective = PolicyObjective(self._config.algo, batch, mask_BT, kl_weight_BT)
            results.append(
                self._step(batch, mask_BT, objective, lr, self._temperature, POLICY_METRICS)
            )
        return _summary(results, lr, POLICY_METRICS)

    def supervise(self, batch: TrainBatch, lr: float | None = None) -> UpdateStats:
        """One step on the mean negative log-prob of the masked tokens, at temperature 1."""
        lr = self._config.sft.lr if lr is None else lr
        mask_BT = batch.mask_BT.bool()
        objective = SupervisedObjective(mask_BT)
        result = self._step(batch, mask_BT, objective, lr, 1.0, SUPERVISED_METRICS)
        return _summary([result], lr, SUPERVISED_METRICS)

    def layout(self) -> list[ShardLayout]:
        """Which rectangles of which Hugging Face tensors this rank holds."""
        return list(self._layout)

    def parameter(self, name: str) -> torch.Tensor:
        """The local tensor of a shard of `layout`, on its device; shares memory."""
        return self._parameters[name].detach()

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder; configuration from the loaded one."""
        export_folder(Path(folder), self._source, self._shape, self._groups, self._parameters)

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        groups.leave()

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature

    def _head(self, num_positions: int, temperature: float) -> Head:
        return Head(temperature=temperature, shard=self._shard, num_positions=num_positions)

    def _micro_batches(
        self, batch: TrainBatch, rows: Sequence[int], select_BT: torch.Tensor
    ) -> list[MicroBatch]:
        lengths = row_lengths(batch)
        position = self._groups.position
        plan = plan_micro_batches(
            [lengths[row] for row in rows],
            num_data=position.data_size,
            budget_tokens=self._config.optim.micro_batch_tokens,
        )
        place = device.device()
        return [
            pack_rows(batch, [rows[index] for index in micro], select_BT, place)
            for micro in plan[position.data_rank]
        ]

    def _step(
        self,
        batch: TrainBatch,
        mask_BT: torch.Tensor,
        objective: Objective,
        lr: float,
        temperature: float,
        metrics: Sequence[str],
    ) -> tuple[dict[str, float], float, bool] | None:
        """One optimizer step; global sums, gradient norm, whether it was taken.

        None, and no step, where no token is trained on.
        """
        rows = torch.nonzero(mask_BT.any(dim=1)).flatten().tolist()
        if not rows:
            return None
        micros = self._micro_batches(batch, rows, mask_BT)
        self._optimizer.zero_grad()
        head = self._head(mask_BT.size(1), temperature)
        shares = self._schedule.train(micros, head, objective)
        norm, taken = self._optimizer.step(lr)
        return self._reduce(shares, ("loss", "num_tokens", *metrics)), norm, taken

    def _reduce(self, shares: list[Share], names: Sequence[str]) -> dict[str, float]:
        """Sum over micro-batches and data ranks, known to every stage."""
        total = torch.zeros(len(names), device=device.device())
        for share in shares:
            total += torch.stack([share[name].float() for name in names])
        if self._groups.position.data_size > 1:
            dist.all_reduce(total, group=self._groups.collection.dp)
        if self._groups.position.pipeline_size > 1:
            dist.broadcast(total, self._groups.last_stage_rank, group=self._groups.collection.pp)
        return dict(zip(names, total.tolist(), strict=True))

    def _swap_reference(self) -> None:
        """Exchange current and reference weights; a second call undoes it."""
        if self._reference is None:
            raise ValueError(
                "logprobs of the reference: there is none; expected algo.kl_coef above 0 or "
                "freeze_reference() before"
            )
        for name, parameter in self._parameters.items():
            current = parameter.data
            parameter.data = self._reference[name]
            self._reference[name] = current


def _summary(
    results: Sequence[tuple[dict[str, float], float, bool] | None],
    lr: float,
    metrics: Sequence[str],
) -> UpdateStats:
    steps = [result for result in results if result is not None]
    num_tokens = sum(sums["num_tokens"] for sums, _, _ in steps)
    norms = [norm for _, norm, taken in steps if taken] or [math.nan]
    return UpdateStats(
        loss=sum(sums["loss"] for sums, _, _ in steps) / max(1, len(steps)),
        grad_norm=sum(norms) / len(norms),
        learning_rate=lr,
        num_tokens=int(num_tokens),
        num_skipped=sum(not taken for _, _, taken in steps),
        metrics={
            name: sum(sums[name] for sums, _, _ in steps) / max(1.0, num_tokens) for name in metrics
        },
    )
