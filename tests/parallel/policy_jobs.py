"""Jobs of the policy tests, run on each rank of a layout.

`run_calls` calls methods of a new policy one after another; `measure` returns what is compared
over the grid of layouts.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from tests.actor.rank_saves import save_checkpoint
from tests.parallel.reference import LR, NUM_STEPS
from tests.rank_shards import call_policy, score, scoring_shards, sft_step, update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mega_agentrl.actor.megatron_model import MegatronModel
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.layout import Rect
    from mega_agentrl.types.batch import TrainBatch, UpdateStats

Blocks = list[tuple[str, "Rect", torch.Tensor]]
"""(Hugging Face name, rectangle, values) of every block that a rank holds."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Results of one rank."""

    scores: tuple[list[int], torch.Tensor, torch.Tensor] | None
    """Row numbers, log-probs and entropies, `[rows, T]`; None if the rank returns none."""
    updates: dict[int, tuple[UpdateStats, Blocks]]
    """Stats of a step with learning rate 0 and its gradients before clipping, by token budget."""
    curve: list[UpdateStats]
    """Stats of the SFT steps that were taken."""
    applied: list[bool]
    """Whether the optimizer took the steps with a NaN gradient, after the first step of `curve`."""
    skipped: UpdateStats
    """Stats of the SFT step in which they were tried; its own gradients have the last NaN."""
    weights_unchanged: bool
    """Whether these steps left the weights as they were."""


def measure(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, budgets: tuple[int, ...]
) -> Measured:
    """Score, take gradients under each token budget, then SFT steps, one with NaN gradients."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    model = policy.megatron_model
    policy.load_hf(config.model.path)
    scores, scored = score(policy, "compute_log_probs", batch), scoring_shards(policy, batch)
    updates = {}
    for budget in budgets:
        config.optim.micro_batch_tokens = budget
        with gradients_before_step(model) as caught:
            stats = update(policy, batch, lr=0.0, scored=scored)
        updates[budget] = (stats, caught[0])
    policy.reset_optimizer()
    curve = [sft_step(policy, batch, LR)]
    before = weights_of(model)
    with poisoned_steps(model, rank_info["rank"], rank_info["world_size"]) as applied:
        skipped = sft_step(policy, batch, LR)
    weights_unchanged = all(
        torch.equal(old, new)
        for (_, _, old), (_, _, new) in zip(before, weights_of(model), strict=True)
    )
    curve += [sft_step(policy, batch, LR) for _ in range(NUM_STEPS - 1)]
    policy.close()
    return Measured(
        scores=scores,
        updates=updates,
        curve=curve,
        applied=applied,
        skipped=skipped,
        weights_unchanged=weights_unchanged,
    )


def run_calls(
    rank_info: dict[str, Any], config: TrainConfig, calls: list[tuple[Any, ...]]
) -> list[Any]:
    """Return the results of `(method, *arguments)` calls.

    "weights" returns the rank's blocks, "save" writes a whole checkpoint (`save_checkpoint`).
    """
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    named = {
        "weights": lambda: weights_of(policy.megatron_model),
        "save": partial(save_checkpoint, policy),
    }
    results = [
        named.get(method, partial(call_policy, policy, method))(*arguments)
        for method, *arguments in calls
    ]
    policy.close()
    return results


def weights_of(model: MegatronModel) -> Blocks:
    """Return this rank's weights, or its adapters if it trains those."""
    return _blocks(model, {name: value.detach() for name, value in model.parameters.items()})


@contextmanager
def gradients_before_step(model: MegatronModel) -> Iterator[list[Blocks]]:
    """Collect this rank's full gradients before each optimizer step."""
    step, caught = model.optimizer.step, []

    def catch(lr: float) -> tuple[float, bool]:
        gather_shards(model)
        shards = model.state_layouts
        gradients = {shard.name: model.parameters[shard.name].main_grad for shard in shards}
        caught.append(_blocks(model, gradients))
        return step(lr)

    model.optimizer.step = catch
    try:
        yield caught
    finally:
        model.optimizer.step = step


@contextmanager
def poisoned(model: MegatronModel, kind: str) -> Iterator[None]:
    """Set gradients of a kind ("dense", "expert") to NaN on this rank before each step.

    With the distributed optimizer only this rank's shard of the buffer is set; the rest holds
    leftovers of the reduction that are not read. An empty kind changes nothing.
    """
    step = model.optimizer.step

    def spoil(lr: float) -> tuple[float, bool]:
        for _, shard, _ in shards_of(model, kind):
            shard.fill_(torch.nan)
        return step(lr)

    if kind:
        model.optimizer.step = spoil
    try:
        yield
    finally:
        model.optimizer.step = step


@contextmanager
def poisoned_steps(model: MegatronModel, own_rank: int, world_size: int) -> Iterator[list[bool]]:
    """Try each optimizer step with NaN gradients of each kind on each rank in turn, as `poisoned`.

    The last NaN stays. Yields a list that gets whether each of these steps was taken.
    """
    step, applied = model.optimizer.step, []
    kinds = ("dense", "expert") if model.shape.moe else ("dense",)

    def try_all(lr: float) -> tuple[float, bool]:
        right: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank, kind in product(range(world_size), kinds):
            for shard, values in right:
                shard.copy_(values)
            shards = [shard for _, shard, _ in shards_of(model, kind)] if rank == own_rank else []
            right = [(shard, shard.clone()) for shard in shards]
            for shard in shards:
                shard.fill_(torch.nan)
            result = step(lr)
            applied.append(result[1])
        return result

    model.optimizer.step = try_all
    try:
        yield applied
    finally:
        model.optimizer.step = step


def gather_shards(model: MegatronModel) -> None:
    """Gather the reduced gradients of all data ranks, so that `main_grad` is complete."""
    for kind in ("dense", "expert"):
        for bucket, shard, group in shards_of(model, kind):
            if shard.numel() < bucket.numel():
                dist.all_gather_into_tensor(bucket, shard.clone(), group=group)


def shards_of(
    model: MegatronModel, kind: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup]]:
    """Yield (bucket, this rank's shard, group of the shards) of the gradient buffers.

    The shard is a view; without the distributed optimizer it is the whole bucket.
    """
    distributed = model.config.parallel.distributed_optimizer
    for chunk in model.chunks:
        for buffer in chunk.buffers if kind == "dense" else chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            count, number = (group.size(), group.rank()) if distributed else (1, 0)
            for bucket in buffer.buckets:
                yield bucket.grad_data, bucket.grad_data.chunk(count)[number], group


def _blocks(model: MegatronModel, values: dict[str, torch.Tensor]) -> Blocks:
    return [
        (
            block.hf_name,
            block.hf_rect,
            values[shard.name][block.local_rect.slices].to("cpu", copy=True),
        )
        for shard in model.state_layouts
        for block in shard.blocks
    ]
