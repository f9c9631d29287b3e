"""Applies, checks and describes changes of configuration values.

`valid_candidates` tries each candidate and keeps those that the caller's check accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

SettingValue = int | float | bool
Overrides = Mapping[str, SettingValue]
"""New values by dotted configuration key."""

ConfigCheck = Callable[["TrainConfig"], None]
"""A check that raises `ValueError` for a configuration that cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A suggested change of configuration values."""

    new_values: Overrides
    """The values that differ from the present configuration."""
    old_values: Overrides
    """The present values of the same keys."""
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
    """Return the value of a dotted key."""
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    assert isinstance(node, int | float), f"{key} is a {type(node).__name__}"
    return node


def with_overrides(config: TrainConfig, settings: Overrides) -> TrainConfig:
    """Return a copy with the given values, whose ranges are not checked."""
    other = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        node: object = other
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return other


def valid_candidates(
    config: TrainConfig, candidates: Iterable[Overrides], check: ConfigCheck
) -> Iterator[tuple[Overrides, TrainConfig]]:
    """Yield the candidates that change the configuration and that `check` accepts."""
    for settings in candidates:
        if all(get_setting(config, key) == value for key, value in settings.items()):
            continue
        other = with_overrides(config, settings)
        try:
            check(other)
        except ValueError:
            continue
        yield settings, other


def make_change(config: TrainConfig, settings: Overrides, gib: float) -> ConfigChange:
    """Return the change that the settings make to the configuration."""
    new = {key: value for key, value in settings.items() if get_setting(config, key) != value}
    return ConfigChange(
        new_values=new,
        old_values={key: get_setting(config, key) for key in new},
        peak_gib=gib,
        num_extra_gpus=num_required_gpus(with_overrides(config, new)) - num_required_gpus(config),
    )


def num_required_gpus(config: TrainConfig) -> int:
    """Return the number of GPUs of a run.

    Policy and critic have GPUs of their own; engines too, unless `cluster.colocated` is set.
    """
    critic = config.algo.needs_critic and not config.is_eval_only
    trained = config.parallel.world_size * (2 if critic else 1)
    engines = config.cluster.num_engines * config.engine.tensor_parallel_size
    return trained + (0 if config.cluster.colocated else engines)


def _format_value(value: SettingValue) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
