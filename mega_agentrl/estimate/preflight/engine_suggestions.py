"""Checks whether an engine fits its GPUs, and suggests changes if it does not.

An engine fits if its peak is within the usable memory and the KV cache holds one request of
`engine.max_model_len` tokens, without which vLLM does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.memory.engine import estimate_engine_memory
from mega_agentrl.estimate.preflight.config_change import (
    ConfigChange,
    make_change,
    valid_candidates,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.preflight.config_change import ConfigCheck, Overrides
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_FACTORS = (2, 4, 8)
_BUCKETS_MIB = (1024, 256, 64)


def engine_fits(config: TrainConfig, shape: ModelShape, device: DeviceSpec) -> bool:
    """Return whether the peak fits the device and the KV cache holds one full request."""
    memory = estimate_engine_memory(config, shape, device)
    holds_request = memory.num_kv_cache_tokens >= config.engine.max_model_len
    return holds_request and memory.peak <= device.usable_bytes


def suggest_engine_changes(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    check: ConfigCheck,
    *,
    limit: int = 4,
) -> list[ConfigChange]:
    """Return up to `limit` changes that fit, those with the fewest extra GPUs and keys first."""
    found = [
        make_change(config, settings, estimate_engine_memory(other, shape, device).peak / GIB)
        for settings, other in valid_candidates(config, _candidates(config), check)
        if engine_fits(other, shape, device)
    ]
    found.sort(key=lambda change: (max(0, change.num_extra_gpus), len(change.new_values)))
    minimal: list[ConfigChange] = []
    for change in found:  # one change per set of keys, and none with more keys than needed
        if not any(set(other.new_values) <= set(change.new_values) for other in minimal):
            minimal.append(change)
    return minimal[:limit]


def _candidates(config: TrainConfig) -> Iterator[Overrides]:
    engine, engines = config.engine, config.cluster.num_engines
    now = engine.gpu_memory_utilization
    for share in sorted((percent / 100 for percent in range(10, 96)), key=lambda p: abs(p - now)):
        yield {"engine.gpu_memory_utilization": share}
    for factor in _FACTORS:
        if engine.max_num_seqs % factor == 0:
            yield {"engine.max_num_seqs": engine.max_num_seqs // factor}
    for bucket_mib in _BUCKETS_MIB:
        if bucket_mib < config.weight_sync.bucket_mib:
            yield {"weight_sync.bucket_mib": bucket_mib}
    for factor in _FACTORS:
        tensor = {"engine.tensor_parallel_size": engine.tensor_parallel_size * factor}
        if engines % factor == 0:
            yield {**tensor, "cluster.num_engines": engines // factor}
        for share in (0.85, 0.9):
            if engines % factor == 0:
                fewer = {"cluster.num_engines": engines // factor}
                yield {**tensor, **fewer, "engine.gpu_memory_utilization": share}
        yield tensor
    least = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield {"engine.max_model_len": least}
