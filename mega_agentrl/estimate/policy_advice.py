"""What to change where the policy does not fit its GPUs; every answer was computed.

Tried in this order, each alone and then with a smaller micro-batch:

    a smaller micro-batch; sharing what is copied (optimizer, tokens between the linears)
    the same ranks cut otherwise: data ranks turned into pipeline, tensor or context ranks,
    experts over more of them
    more ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.estimate.change import Change, changed, make, trials
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.policy_memory import longest_row, policy_memory

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.change import Check, Settings
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.reshard.model_shape import ModelShape

_TOKENS = "optim.micro_batch_tokens"
_BUCKET = "weights.bucket_mib"
_STEP_TOKENS = 128
_FACTORS = (2, 4, 8)
_BUCKETS_MIB = (1024, 256, 64)


def policy_peak(
    config: TrainConfig, shape: ModelShape, device: Device, *, imbalance: float = 1.0
) -> float:
    """GiB of the fullest rank."""
    stages = policy_memory(config, shape, device, imbalance=imbalance)
    return max(memory.peak for memory in stages) / GIB


def policy_changes(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    check: Check,
    *,
    imbalance: float = 1.0,
    limit: int = 4,
) -> list[Change]:
    """Up to `limit` changes that fit, those with the fewest keys and GPUs first; [] where none
    was found. check: raises `ValueError` for a configuration that cannot run.
    """
    room = device.usable_bytes / GIB

    def peak(settings: Settings) -> float:
        return policy_peak(changed(config, settings), shape, device, imbalance=imbalance)

    found: dict[frozenset[str], Change] = {}
    for settings in ({}, *_candidates(config)):
        chosen = settings
        if not settings or not _passes(config, settings, check) or peak(settings) > room:
            if _BUCKET in settings:  # no help against what activations take
                continue
            smaller = _smaller_batch(config, settings, check, peak, room)
            if smaller is None:
                continue
            chosen = smaller
        change = make(config, chosen, peak(chosen))
        found.setdefault(frozenset(change.settings), change)
    cheapest = sorted(found.values(), key=lambda c: (max(0, c.num_gpus), len(c.settings)))
    return cheapest[:limit]


def _smaller_batch(
    config: TrainConfig,
    settings: Settings,
    check: Check,
    peak: Callable[[Settings], float],
    room: float,
) -> Settings | None:
    """The settings with the largest micro-batch, at most the present one, that fits `room` GiB."""
    low = _up(ceil(longest_row(config) / _context(config, settings)))
    high = config.optim.micro_batch_tokens
    smallest = {**settings, _TOKENS: low}
    if low >= high or not _passes(config, smallest, check) or peak(smallest) > room:
        return None
    while high - low > _STEP_TOKENS:
        middle = _up((low + high) // 2)
        if middle >= high:
            break
        fits = peak({**settings, _TOKENS: middle}) <= room
        low, high = (middle, high) if fits else (low, middle)
    return {**settings, _TOKENS: low}


def _passes(config: TrainConfig, settings: Settings, check: Check) -> bool:
    return any(True for _ in trials(config, [settings], check))


def _candidates(config: TrainConfig) -> Iterator[Settings]:
    layout = config.parallel
    if not layout.distributed_optimizer:
        yield {"parallel.distributed_optimizer": True}
    if layout.tensor > 1 and not layout.sequence:
        yield {"parallel.sequence": True}
    for bucket_mib in _BUCKETS_MIB:
        if bucket_mib < config.weights.bucket_mib:
            yield {_BUCKET: bucket_mib}
    for factor in (*_FACTORS, 16, 32, 64):
        yield {"parallel.expert": layout.expert * factor}
    for factor in _FACTORS:
        for settings in _cuts(config, factor):
            if layout.data % factor == 0:
                yield {**settings, "parallel.data": layout.data // factor}
    for factor in _FACTORS:
        yield {"parallel.data": layout.data * factor}
        yield from _cuts(config, factor)
        wider = {"parallel.tensor": layout.tensor * 2, "parallel.sequence": True}
        yield {**wider, "parallel.data": layout.data * factor}


def _cuts(config: TrainConfig, factor: int) -> Iterator[Settings]:
    layout = config.parallel
    yield {"parallel.pipeline": layout.pipeline * factor}
    yield {"parallel.tensor": layout.tensor * factor, "parallel.sequence": True}
    yield {"parallel.context": layout.context * factor}


def _context(config: TrainConfig, settings: Settings) -> int:
    return int(settings.get("parallel.context", config.parallel.context))


def _up(tokens: int) -> int:
    return -(-tokens // _STEP_TOKENS) * _STEP_TOKENS
