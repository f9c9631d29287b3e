"""One rank's part of a Megatron network: its weights, passes over a batch, optimizer steps.

What every role shares (policy, critic, reward model); a role adds its head and its objective.
Every rank of the layout makes one `Network` and calls the same methods in the same order with
the same batch; each works on its data share, its stage and its tensor shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mega_agentrl.actor import device, groups
from mega_agentrl.actor.export import export_folder
from mega_agentrl.actor.learning_rate import learning_rate
from mega_agentrl.actor.model import build_chunks, check_layout, forget_routing, wrap_data_parallel
from mega_agentrl.actor.offload import Offload, require_on_device
from mega_agentrl.actor.optimizer import PolicyOptimizer
from mega_agentrl.actor.packing import MicroBatch, pack_rows, row_lengths
from mega_agentrl.actor.schedule import Schedule
from mega_agentrl.batch.balance import plan_micro_batches
from mega_agentrl.reshard.checkpoint import read_shards
from mega_agentrl.reshard.model_shape import HeadKind, ModelShape
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mega_agentrl.actor.heads import Head
    from mega_agentrl.actor.schedule import Objective, Share
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """How a process joins: its rank, the meeting point and the deadline of collectives.

    num_threads: of the CPU, for each operation.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    timeout_s: float
    num_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step. sums: over all tokens, by name. taken: False where it was skipped."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float
    taken: bool


class Network:
    """One process's part of the network; weights are undefined until `load`.

    Without `trains` the weights are frozen: no gradient buffers, no optimizer, no `step`.
    """

    def __init__(
        self, config: TrainConfig, shape: ModelShape, seat: Seat, *, trains: bool = True
    ) -> None:
        self.config = config
        self.shape = shape
        position = groups.Position.of(seat.rank, config.parallel)
        self.layout = megatron_layout(shape, position.place, fused=device.has_transformer_engine())
        torch.set_num_threads(seat.num_threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        device.choose_device(seat.rank)
        self.groups = groups.join(
            config.parallel,
            rank=seat.rank,
            world_size=seat.world_size,
            master_address=seat.master_address,
            master_port=seat.master_port,
            timeout_s=seat.timeout_s,
        )
        self.dtype = device.train_dtype(config.model.dtype)
        chunks = build_chunks(shape, self.groups, config.parallel, self.dtype)
        check_layout(chunks, self.layout)
        self.parameters = {
            f"{position.place.prefix(number)}{name}": parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_(trains)
        self.chunks = wrap_data_parallel(chunks, self.groups, config.parallel)
        self._optimizer = self._make_optimizer() if trains else None
        self.num_steps, self.most_tokens = 0, 0
        self.source = Path(config.model.path)
        self.offload = Offload(self.chunks, self._optimizer)
        self._schedule = Schedule(self.chunks, self.groups)

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> PolicyOptimizer:
        """Of a network that trains."""
        assert self._optimizer is not None, "a frozen network has no optimizer"
        return self._optimizer

    def load(self, folder: str, *, fresh: Collection[str] = ()) -> None:
        """Read this rank's slices of a checkpoint of the same shape; moments start anew.

        fresh: tensors that start at 0 where the folder lacks them. A network with a scalar
        head takes the body of a policy.
        Raises `ValueError` where the folder holds a model of another shape.
        """
        self.read(folder, fresh=fresh)
        self.source = Path(folder)
        if self._optimizer is not None:
            self._optimizer.reload()
            self.reset_optimizer()

    def read(self, folder: str, *, fresh: Collection[str] = ()) -> None:
        """Put this rank's slices of a checkpoint into the parameters, and touch nothing else.

        Raises `ValueError` where the folder holds a model of another shape.
        """
        shape = ModelShape.from_folder(folder)
        if self.shape.head is HeadKind.scalar:
            shape = shape.with_scalar_head()
        if shape != self.shape:
            raise ValueError(
                f"load {folder}: shape {shape} differs from {self.shape}, which the ranks were "
                "built for; probable cause: another model than model.path names"
            )
        for shard in self.layout:
            if any(block.hf_name in fresh for block in shard.blocks):
                self.parameters[shard.name].detach().zero_()
        read_shards(folder, self.layout, hf_shapes(shape), self.parameters, fresh=fresh)

    def reset_optimizer(self) -> None:
        """Forget moments and step count; the learning rate's course starts again."""
        self.optimizer.reset()
        self.num_steps = 0

    def score(
        self, batch: TrainBatch, select_BT: torch.Tensor, head: Head
    ) -> tuple[list[int], tuple[torch.Tensor, ...]] | None:
        """The head's tensors for this rank's data share, without gradients.

        select_BT: [B, T] bool, the tokens to look at. Returns rows and [rows, T] CPU tensors
        on the one rank of the last stage that speaks for the data share, else None.
        """
        micros = self._micro_batches(batch, range(batch.num_rows), select_BT)
        scores = self._schedule.score(micros, head)
        position = self.groups.position
        if not position.last_stage or position.place.tensor_rank:
            return None
        rows = [row for micro in micros for row in micro.rows]
        values = [torch.cat(parts) for parts in zip(*scores, strict=True)]
        if position.context_size > 1:
            with doing("sum of the scores", self.groups.peers("context")):
                for value in values:
                    dist.all_reduce(value, group=self.groups.collection.cp)
        if position.context_rank:
            return None
        return rows, tuple(value.cpu() for value in values)

    def step(
        self,
        batch: TrainBatch,
        mask_BT: torch.Tensor,
        head: Head,
        objective: Objective,
        names: Sequence[str],
        *,
        lr: float | None = None,
    ) -> StepResult | None:
        """One optimizer step on the rows with a token in mask_BT ([B, T] bool).

        names: metrics of the objective's shares to add up. lr: in place of the schedule's.
        None, and no step, where no token is trained on.
        """
        rows = torch.nonzero(mask_BT.any(dim=1)).flatten().tolist()
        if not rows:
            return None
        micros = self._micro_batches(batch, rows, mask_BT)
        self.most_tokens = max(self.most_tokens, *(len(micro.token_S) for micro in micros))
        self.optimizer.zero_grad()
        shares = self._schedule.train(micros, head, objective)
        lr = self._learning_rate() if lr is None else lr
        with doing("optimizer step", self.groups.peers("all")):
            norm, taken = self.optimizer.step(lr)
        self.num_steps += taken
        with doing("sum of the metrics", self.groups.peers("data", "pipeline")):
            sums = self._reduce(shares, ("loss", "num_tokens", *names))
        return StepResult(sums=sums, grad_norm=norm, learning_rate=lr, taken=taken)

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder; configuration from the loaded one."""
        require_on_device("export", {"weights"}, self.offload.on_host)
        with doing("writing of the model", self.groups.peers("all")):
            export_folder(
                Path(folder),
                self.source,
                self.shape,
                self.groups,
                self.config.parallel,
                self.parameters,
            )

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        forget_routing(self.chunks)
        groups.leave()

    def _make_optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(
            self.chunks,
            self.groups,
            self.config.optim,
            self.dtype,
            distributed=self.config.parallel.distributed_optimizer,
        )

    def _learning_rate(self) -> float:
        optim = self.config.optim
        return learning_rate(self.num_steps, optim, self.config.total_steps * optim.num_minibatches)

    def _micro_batches(
        self, batch: TrainBatch, rows: Sequence[int], select_BT: torch.Tensor
    ) -> list[MicroBatch]:
        lengths = row_lengths(batch)
        position, layout = self.groups.position, self.config.parallel
        plan = plan_micro_batches(
            [lengths[row] for row in rows],
            num_data=position.data_size,
            budget_tokens=self.config.optim.micro_batch_tokens * position.context_size,
            num_multiple=layout.pipeline if layout.virtual > 1 else 1,
        )
        place = device.device()
        return [
            pack_rows(
                batch,
                [rows[index] for index in micro],
                select_BT,
                place,
                multiple=layout.tensor if layout.sequence else 1,
                context_rank=position.context_rank,
                context_size=position.context_size,
            )
            for micro in plan[position.data_rank]
        ]

    def _reduce(self, shares: list[Share], names: Sequence[str]) -> dict[str, float]:
        """Sum over micro-batches and data ranks, known to every stage."""
        total = torch.zeros(len(names), device=device.device())
        for share in shares:
            total += torch.stack([share[name].float() for name in names])
        if self.groups.collection.dp_cp.size() > 1:
            dist.all_reduce(total, group=self.groups.collection.dp_cp)
        if self.groups.collection.pp.size() > 1:
            dist.broadcast(total, self.groups.last_stage_rank, group=self.groups.collection.pp)
        return dict(zip(names, total.tolist(), strict=True))


def summary(results: Sequence[StepResult | None], names: Sequence[str]) -> UpdateStats:
    """What the steps of one update report together; None entries trained nothing."""
    steps = [result for result in results if result is not None]
    num_tokens = sum(step.sums["num_tokens"] for step in steps)
    norms = [step.grad_norm for step in steps if step.taken] or [math.nan]
    return UpdateStats(
        loss=sum(step.sums["loss"] for step in steps) / max(1, len(steps)),
        grad_norm=sum(norms) / len(norms),
        learning_rate=steps[-1].learning_rate if steps else 0.0,
        num_tokens=int(num_tokens),
        num_skipped=sum(not step.taken for step in steps),
        metrics={
            name: sum(step.sums[name] for step in steps) / max(1.0, num_tokens) for name in names
        },
    )
