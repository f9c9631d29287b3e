"""Suggests configuration changes that make the policy or an engine fit its GPUs.

Every suggestion is verified by a memory estimate. Candidates for the policy are tried in this
order, each alone and then with a smaller micro-batch:

    a smaller micro-batch;
    sharding of replicated state (distributed optimizer, sequence parallelism);
    activation recomputation;
    the same number of ranks: data ranks turned into pipeline, tensor or context ranks, or experts
    over more ranks;
    more ranks;
    flat rows instead of trees, whose attention gathers the keys of all paths

An engine fits if its peak is within the usable memory and the KV cache holds one request of
`engine.max_model_len` tokens, because vLLM does not start with a smaller cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Choice, Recompute
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.memory.engine import estimate_engine_memory
from mega_agentrl.estimate.memory.micro_batches import max_row_tokens
from mega_agentrl.estimate.memory.policy import estimate_policy_memory
from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

SettingValue = int | float | bool | Choice
Overrides = Mapping[str, SettingValue]
"""New values by dotted configuration key."""

ConfigCheck = Callable[["TrainConfig"], None]
"""A check that raises `ValueError` for a configuration that cannot run."""

_TOKENS_KEY = "optim.micro_batch_tokens"
_BUCKET_KEY = "weight_sync.bucket_mib"
_TOKEN_GRANULARITY = 128
"""Suggested micro-batches are multiples of this number of tokens."""
_FACTORS = (2, 4, 8)
"""Factors by which sizes and counts are changed."""
_BUCKETS_MIB = (1024, 256, 64)
"""Bucket sizes to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A suggested change of configuration values."""

    new_values: Overrides
    """New values of the keys that change."""
    old_values: Overrides
    """Old values of these keys."""
    peak_gib: float
    """Peak GiB of a rank after the change."""
    num_extra_gpus: int
    """Number of GPUs that the change adds; negative if it needs fewer."""

    def __str__(self) -> str:
        parts = [
            f"{key}={_format_value(value)} (from {_format_value(self.old_values[key])})"
            for key, value in self.new_values.items()
        ]
        more = f" on {self.num_extra_gpus} more GPUs" if self.num_extra_gpus > 0 else ""
        return f"{' with '.join(parts)}: {self.peak_gib:.1f} GiB{more}"


def get_setting(config: TrainConfig, key: str) -> SettingValue:
    """Return the configured value of a dotted key, such as `parallel.tensor`."""
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    assert isinstance(node, int | float | Choice), f"{key} is a {type(node).__name__}"
    return node


def with_overrides(config: TrainConfig, settings: Overrides) -> TrainConfig:
    """Return a copy of the configuration with the given values; their ranges are not checked."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        node: object = changed
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return changed


def valid_candidates(
    config: TrainConfig, candidates: Iterable[Overrides], check: ConfigCheck
) -> Iterator[tuple[Overrides, TrainConfig]]:
    """Yield the candidates that change the configuration and that `check` accepts.

    Yields:
        The candidate and the configuration with its values.
    """
    for settings in candidates:
        if all(get_setting(config, key) == value for key, value in settings.items()):
            continue
        changed = with_overrides(config, settings)
        try:
            check(changed)
        except ValueError:
            continue
        yield settings, changed


def make_change(config: TrainConfig, settings: Overrides, peak_gib: float) -> ConfigChange:
    """Return the change that the settings make to the configuration.

    Args:
        config: The configuration before the change.
        settings: New values; those that equal the configured value are left out of the change.
        peak_gib: Peak GiB of a rank after the change.
    """
    new_values = {
        key: value for key, value in settings.items() if get_setting(config, key) != value
    }
    changed = with_overrides(config, new_values)
    return ConfigChange(
        new_values=new_values,
        old_values={key: get_setting(config, key) for key in new_values},
        peak_gib=peak_gib,
        num_extra_gpus=num_required_gpus(changed) - num_required_gpus(config),
    )


def num_required_gpus(config: TrainConfig) -> int:
    """Return the number of GPUs of a run.

    Policy, critic and engines have GPUs of their own, unless `cluster.colocated_models` or
    `cluster.colocated` is set.
    """
    critic = "critic" in config.auxiliary_models and not config.cluster.colocated_models
    num_training_gpus = config.parallel.world_size * (2 if critic else 1)
    num_engine_gpus = config.cluster.num_engines * config.engine.tensor_parallel_size
    return num_training_gpus + (0 if config.cluster.colocated else num_engine_gpus)


def _format_value(value: SettingValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def policy_peak_gib(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, *, imbalance: float = 1.0
) -> float:
    """Return the peak GiB of the policy rank that needs the most memory."""
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
    """Return changes with which the policy fits, those with the fewest extra GPUs and keys first.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        check: Raises `ValueError` for a configuration that cannot run for other reasons.
        imbalance: Tokens of the busiest expert rank divided by the mean.
        limit: Maximum number of changes.
    """
    usable_gib = device.usable_bytes / GIB

    def peak_gib(settings: Overrides) -> float:
        return policy_peak_gib(with_overrides(config, settings), shape, device, imbalance=imbalance)

    changes: dict[frozenset[str], ConfigChange] = {}
    for candidate in ({}, *_policy_candidates(config)):
        settings: Overrides | None = candidate
        if (
            not candidate
            or not _is_valid(config, candidate, check)
            or peak_gib(candidate) > usable_gib
        ):
            if _BUCKET_KEY in candidate:  # the bucket size does not help against activations
                continue
            settings = _largest_fitting_micro_batch(config, candidate, check, peak_gib, usable_gib)
        if settings is not None:
            change = make_change(config, settings, peak_gib(settings))
            changes.setdefault(frozenset(change.new_values), change)
    return sorted(changes.values(), key=_change_cost)[:limit]


def _change_cost(change: ConfigChange) -> tuple[int, int]:
    """Return the sort key of a change: the number of extra GPUs, then of keys."""
    return max(0, change.num_extra_gpus), len(change.new_values)


def _largest_fitting_micro_batch(
    config: TrainConfig,
    settings: Overrides,
    check: ConfigCheck,
    peak_gib: Callable[[Overrides], float],
    usable_gib: float,
) -> Overrides | None:
    """Return the settings with the largest micro-batch that fits, or None if no micro-batch fits.

    Args:
        config: The run.
        settings: New values of other keys.
        check: Raises `ValueError` for a configuration that cannot run for other reasons.
        peak_gib: Returns the peak GiB of a policy rank with some new values.
        usable_gib: Usable GiB of a device.
    """
    row_tokens = ceil(max_row_tokens(config) / _context_parallel_size(config, settings))
    low = round_up(row_tokens, _TOKEN_GRANULARITY)
    high = config.optim.micro_batch_tokens
    smallest = {**settings, _TOKENS_KEY: low}
    if low >= high or not _is_valid(config, smallest, check) or peak_gib(smallest) > usable_gib:
        return None
    while high - low > _TOKEN_GRANULARITY:
        middle = round_up((low + high) // 2, _TOKEN_GRANULARITY)
        if middle >= high:
            break
        fits = peak_gib({**settings, _TOKENS_KEY: middle}) <= usable_gib
        low, high = (middle, high) if fits else (low, middle)
    return {**settings, _TOKENS_KEY: low}


def _is_valid(config: TrainConfig, settings: Overrides, check: ConfigCheck) -> bool:
    return any(True for _ in valid_candidates(config, [settings], check))


def _policy_candidates(config: TrainConfig) -> Iterator[Overrides]:
    layout = config.parallel
    if not layout.distributed_optimizer:
        yield {"parallel.distributed_optimizer": True}
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    kinds = list(Recompute)
    for recompute in kinds[kinds.index(layout.recompute) + 1 :]:
        yield {"parallel.recompute": recompute}
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
    if config.batch.trees:
        yield {"batch.trees": False}


def _layout_candidates(config: TrainConfig, factor: int) -> Iterator[Overrides]:
    layout = config.parallel
    yield {"parallel.pipeline": layout.pipeline * factor}
    yield {"parallel.tensor": layout.tensor * factor, "parallel.sequence_parallel": True}
    yield {"parallel.context": layout.context * factor}


def _context_parallel_size(config: TrainConfig, settings: Overrides) -> int:
    return int(settings.get("parallel.context", config.parallel.context))


def engine_fits(config: TrainConfig, shape: ModelShape, device: DeviceSpec) -> bool:
    """Return whether the peak fits an engine's GPUs and the KV cache holds one full request."""
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
    """Return changes with which an engine fits, those with the fewest extra GPUs and keys first.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        check: Raises `ValueError` for a configuration that cannot run for other reasons.
        limit: Maximum number of changes.
    """
    changes = [
        make_change(config, settings, estimate_engine_memory(changed, shape, device).peak / GIB)
        for settings, changed in valid_candidates(config, _engine_candidates(config), check)
        if engine_fits(changed, shape, device)
    ]
    changes.sort(key=_change_cost)
    minimal_changes: list[ConfigChange] = []
    for change in changes:  # one change per set of keys, and none with more keys than needed
        keys = set(change.new_values)
        if not any(set(minimal.new_values) <= keys for minimal in minimal_changes):
            minimal_changes.append(change)
    return minimal_changes[:limit]


def _engine_candidates(config: TrainConfig) -> Iterator[Overrides]:
    engine, num_engines = config.engine, config.cluster.num_engines
    utilization = engine.gpu_memory_utilization
    shares = (percent / 100 for percent in range(10, 96))
    for share in sorted(shares, key=lambda share: abs(share - utilization)):
        yield {"engine.gpu_memory_utilization": share}
    for factor in _FACTORS:
        if engine.max_num_seqs % factor == 0:
            yield {"engine.max_num_seqs": engine.max_num_seqs // factor}
    for bucket_mib in _BUCKETS_MIB:
        if bucket_mib < config.weight_sync.bucket_mib:
            yield {"weight_sync.bucket_mib": bucket_mib}
    for factor in _FACTORS:
        tensor = {"engine.tensor_parallel_size": engine.tensor_parallel_size * factor}
        if num_engines % factor == 0:
            yield {**tensor, "cluster.num_engines": num_engines // factor}
        for share in (0.85, 0.9):
            if num_engines % factor == 0:
                fewer_engines = {"cluster.num_engines": num_engines // factor}
                yield {**tensor, **fewer_engines, "engine.gpu_memory_utilization": share}
        yield tensor
    min_model_len = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield {"engine.max_model_len": min_model_len}
