"""What the tests of the policy run on each rank of a layout.

`run_calls` calls methods of a fresh policy one after another; `measure` takes the figures that
are compared over the grid of layouts.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor.network import Seat
from mega_agentrl.actor.policy import PolicyRank
from tests.parallel.reference import LR, NUM_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mega_agentrl.actor.network import Network
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.layout import Rect
    from mega_agentrl.types.batch import TrainBatch, UpdateStats

Blocks = list[tuple[str, "Rect", torch.Tensor]]
"""(Hugging Face name, rectangle, values) of everything one rank holds."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """One rank's figures.

    scores: of `PolicyRank.logprobs`. updates: stats of a step of size 0, gradients before
    clipping, by token budget. curve: of supervised steps, after the skipped ones in `skipped`.
    """

    scores: tuple[list[int], torch.Tensor, torch.Tensor] | None
    updates: dict[int, tuple[UpdateStats, Blocks]]
    curve: list[UpdateStats]
    skipped: list[UpdateStats]
    kept_weights: bool


def measure(
    seat: dict[str, Any], config: TrainConfig, batch: TrainBatch, budgets: tuple[int, ...]
) -> Measured:
    """Score; gradients under each token budget; supervised steps, some of them poisoned."""
    policy = PolicyRank(config, Seat(**seat))
    network = policy.network
    policy.load(config.model.path)
    scores = policy.logprobs(batch)
    updates = {}
    for budget in budgets:
        config.optim.micro_batch_tokens = budget
        with gradients_before_step(network) as caught:
            stats = policy.update(batch, lr=0.0)
        updates[budget] = (stats, caught[0])
    policy.reset_optimizer()
    curve, skipped = [policy.supervise(batch, LR)], []
    before = weights_of(network)
    kinds = ("dense", "expert") if network.shape.moe else ("dense",)
    for rank, kind in product(range(seat["world_size"]), kinds):
        with poisoned(network, kind if seat["rank"] == rank else ""):
            skipped.append(policy.supervise(batch, LR))
    kept = all(
        torch.equal(old, new)
        for (_, _, old), (_, _, new) in zip(before, weights_of(network), strict=True)
    )
    curve += [policy.supervise(batch, LR) for _ in range(NUM_STEPS - 1)]
    policy.close()
    return Measured(scores=scores, updates=updates, curve=curve, skipped=skipped, kept_weights=kept)


def run_calls(seat: dict[str, Any], config: TrainConfig, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Results of `(method, *arguments)` on a loaded policy; "weights" gives what a rank holds."""
    policy = PolicyRank(config, Seat(**seat))
    policy.load(config.model.path)
    results = [
        weights_of(policy.network) if method == "weights" else getattr(policy, method)(*arguments)
        for method, *arguments in calls
    ]
    policy.close()
    return results


def weights_of(network: Network) -> Blocks:
    """This rank's weights."""
    return _blocks(network, {name: value.detach() for name, value in network.parameters.items()})


@contextmanager
def gradients_before_step(network: Network) -> Iterator[list[Blocks]]:
    """Fills the list with this rank's whole gradients each time the optimizer is to step."""
    step, caught = network.optimizer.step, []

    def catch(lr: float) -> tuple[float, bool]:
        gather_shares(network)
        gradients = {name: value.main_grad for name, value in network.parameters.items()}
        caught.append(_blocks(network, gradients))
        return step(lr)

    network.optimizer.step = catch
    try:
        yield caught
    finally:
        network.optimizer.step = step


@contextmanager
def poisoned(network: Network, kind: str) -> Iterator[None]:
    """Gradients of a kind ("dense", "expert") are NaN on this rank when the optimizer is to step.

    With the distributed optimizer only its share of the buffer counts; the rest holds leftovers
    of the reduction that nobody reads. An empty kind leaves all as it is.
    """
    step = network.optimizer.step

    def spoil(lr: float) -> tuple[float, bool]:
        for _, share, _ in shares_of(network, kind):
            share.fill_(torch.nan)
        return step(lr)

    if kind:
        network.optimizer.step = spoil
    try:
        yield
    finally:
        network.optimizer.step = step


def gather_shares(network: Network) -> None:
    """Undo the cut of the reduced gradients over data ranks, so that `main_grad` is whole."""
    for kind in ("dense", "expert"):
        for whole, share, group in shares_of(network, kind):
            if share.numel() < whole.numel():
                dist.all_gather_into_tensor(whole, share.clone(), group=group)


def shares_of(
    network: Network, kind: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup]]:
    """(whole bucket, this rank's share, group that shares it) of the gradient buffers.

    The share is a view, and the whole without the distributed optimizer.
    """
    distributed = network.config.parallel.distributed_optimizer
    for chunk in network.chunks:
        for buffer in chunk.buffers if kind == "dense" else chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            count, number = (group.size(), group.rank()) if distributed else (1, 0)
            for bucket in buffer.buckets:
                yield bucket.grad_data, bucket.grad_data.chunk(count)[number], group


def _blocks(network: Network, values: dict[str, torch.Tensor]) -> Blocks:
    return [
        (block.hf_name, block.hf_rect, values[shard.name][block.local_rect.slices].clone())
        for shard in network.layout
        for block in shard.blocks
    ]
