"""Suggests configuration changes that make the policy fit its GPUs.

Every suggestion is verified by a memory estimate. Candidates are tried in this order, each alone
and then with a smaller micro-batch:

    a smaller micro-batch; sharding of replicated state (distributed optimizer, sequence
    parallelism) the same number of ranks: data ranks turned into pipeline, tensor or context ranks,
    or experts over more ranks more ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.memory.policy import estimate_policy_memory, max_row_tokens
from mega_agentrl.estimate.preflight.config_change import (
    ConfigChange,
    make_change,
    valid_candidates,
    with_overrides,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.preflight.config_change import ConfigCheck, Overrides
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_TOKENS_KEY = "optim.micro_batch_tokens"
_BUCKET_KEY = "weight_sync.bucket_mib"
_TOKEN_GRANULARITY = 128
_FACTORS = (2, 4, 8)
_BUCKETS_MIB = (1024, 256, 64)


def policy_peak_gib(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, *, imbalance: float = 1.0
) -> float:
    """Return the peak GiB of the fullest rank."""
    stages = estimate_policy_memory(config, shape, device, imbalance=imbalance)
    return max(memory.peak for memory in stages) / GIB


def suggest_policy_changes(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    check: ConfigCheck,
    *,
    imbalance: float = 1.0,
    limit: int = 4,
) -> list[ConfigChange]:
    """Return up to `limit` changes that fit, those with the fewest extra GPUs and keys first.

    Args:
        config: the configuration that does not fit.
        shape: the model.
        device: the device of a rank.
        check: raises `ValueError` for a configuration that cannot run.
        imbalance: tokens of the busiest expert rank divided by the mean.
        limit: maximum number of changes.
    """
    room = device.usable_bytes / GIB

    def peak(settings: Overrides) -> float:
        return policy_peak_gib(with_overrides(config, settings), shape, device, imbalance=imbalance)

    found: dict[frozenset[str], ConfigChange] = {}
    for settings in ({}, *_candidates(config)):
        chosen = settings
        if not settings or not _is_valid(config, settings, check) or peak(settings) > room:
            if _BUCKET_KEY in settings:  # the bucket size does not help against activations
                continue
            smaller = _largest_fitting_micro_batch(config, settings, check, peak, room)
            if smaller is None:
                continue
            chosen = smaller
        change = make_change(config, chosen, peak(chosen))
        found.setdefault(frozenset(change.new_values), change)
    cheapest = sorted(found.values(), key=lambda c: (max(0, c.num_extra_gpus), len(c.new_values)))
    return cheapest[:limit]


def _largest_fitting_micro_batch(
    config: TrainConfig,
    settings: Overrides,
    check: ConfigCheck,
    peak: Callable[[Overrides], float],
    room: float,
) -> Overrides | None:
    """Return the settings with the largest micro-batch that fits `room` GiB, or None."""
    low = _round_up_tokens(ceil(max_row_tokens(config) / _context_parallel_size(config, settings)))
    high = config.optim.micro_batch_tokens
    smallest = {**settings, _TOKENS_KEY: low}
    if low >= high or not _is_valid(config, smallest, check) or peak(smallest) > room:
        return None
    while high - low > _TOKEN_GRANULARITY:
        middle = _round_up_tokens((low + high) // 2)
        if middle >= high:
            break
        fits = peak({**settings, _TOKENS_KEY: middle}) <= room
        low, high = (middle, high) if fits else (low, middle)
    return {**settings, _TOKENS_KEY: low}


def _is_valid(config: TrainConfig, settings: Overrides, check: ConfigCheck) -> bool:
    return any(True for _ in valid_candidates(config, [settings], check))


def _candidates(config: TrainConfig) -> Iterator[Overrides]:
    layout = config.parallel
    if not layout.distributed_optimizer:
        yield {"parallel.distributed_optimizer": True}
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    for bucket_mib in _BUCKETS_MIB:
        if bucket_mib < config.weight_sync.bucket_mib:
            yield {_BUCKET_KEY: bucket_mib}
    for factor in (*_FACTORS, 16, 32, 64):
        yield {"parallel.expert": layout.expert * factor}
    for factor in _FACTORS:
        for settings in _layout_candidates(config, factor):
            if layout.data % factor == 0:
                yield {**settings, "parallel.data": layout.data // factor}
    for factor in _FACTORS:
        yield {"parallel.data": layout.data * factor}
        yield from _layout_candidates(config, factor)
        wider = {"parallel.tensor": layout.tensor * 2, "parallel.sequence_parallel": True}
        yield {**wider, "parallel.data": layout.data * factor}


def _layout_candidates(config: TrainConfig, factor: int) -> Iterator[Overrides]:
    layout = config.parallel
    yield {"parallel.pipeline": layout.pipeline * factor}
    yield {"parallel.tensor": layout.tensor * factor, "parallel.sequence_parallel": True}
    yield {"parallel.context": layout.context * factor}


def _context_parallel_size(config: TrainConfig, settings: Overrides) -> int:
    return int(settings.get("parallel.context", config.parallel.context))


def _round_up_tokens(tokens: int) -> int:
    return -(-tokens // _TOKEN_GRANULARITY) * _TOKEN_GRANULARITY
