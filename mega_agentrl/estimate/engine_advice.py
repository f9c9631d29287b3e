"""Whether an engine can run on its GPUs, and what to change where it cannot.

Two conditions: vLLM's share with what lies beside it fits the GPU, and the KV cache that is left
holds one request of `engine.max_model_len` tokens (vLLM does not start otherwise).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.estimate.change import Change, make, trials
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.engine_memory import engine_memory

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.change import Check, Settings
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.reshard.model_shape import ModelShape

_FACTORS = (2, 4, 8)
_BUCKETS_MIB = (1024, 256, 64)


def engine_fits(config: TrainConfig, shape: ModelShape, device: Device) -> bool:
    """Whether both conditions hold."""
    memory = engine_memory(config, shape, device)
    full = memory.cache_tokens >= config.engine.max_model_len
    return full and memory.peak <= device.usable_bytes


def engine_changes(
    config: TrainConfig, shape: ModelShape, device: Device, check: Check, *, limit: int = 4
) -> list[Change]:
    """Up to `limit` changes that fit, those with the fewest keys and GPUs first."""
    found = [
        make(config, settings, engine_memory(other, shape, device).peak / GIB)
        for settings, other in trials(config, _candidates(config), check)
        if engine_fits(other, shape, device)
    ]
    found.sort(key=lambda change: (max(0, change.num_gpus), len(change.settings)))
    kept: list[Change] = []
    for change in found:  # of the same keys only the nearest values, and no key more than needed
        if not any(set(other.settings) <= set(change.settings) for other in kept):
            kept.append(change)
    return kept[:limit]


def _candidates(config: TrainConfig) -> Iterator[Settings]:
    engine, engines = config.engine, config.cluster.num_engines
    now = engine.memory_fraction
    for share in sorted((percent / 100 for percent in range(10, 96)), key=lambda p: abs(p - now)):
        yield {"engine.memory_fraction": share}
    for factor in _FACTORS:
        if engine.max_concurrent % factor == 0:
            yield {"engine.max_concurrent": engine.max_concurrent // factor}
    for bucket_mib in _BUCKETS_MIB:
        if bucket_mib < config.weights.bucket_mib:
            yield {"weights.bucket_mib": bucket_mib}
    for factor in _FACTORS:
        tensor = {"engine.tensor": engine.tensor * factor}
        if engines % factor == 0:
            yield {**tensor, "cluster.num_engines": engines // factor}
        for share in (0.85, 0.9):
            if engines % factor == 0:
                fewer = {"cluster.num_engines": engines // factor}
                yield {**tensor, **fewer, "engine.memory_fraction": share}
        yield tensor
    least = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield {"engine.max_model_len": least}
