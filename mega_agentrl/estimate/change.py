"""Other values for some keys of a configuration: made, described, tried.

A change is tried, never guessed: `trials` keeps those that the caller's check accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

Value = int | float | bool
Settings = Mapping[str, Value]
"""Values by dotted key."""

Check = Callable[["TrainConfig"], None]
"""Raises `ValueError` for a configuration that cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """settings: the new values. before: the present ones. gib: of a rank at its peak, after.
    num_gpus: that the run takes more than before.
    """

    settings: Settings
    before: Settings
    gib: float
    num_gpus: int

    def __str__(self) -> str:
        parts = [
            f"{key}={_shown(value)} (from {_shown(self.before[key])})"
            for key, value in self.settings.items()
        ]
        more = f" on {self.num_gpus} more GPUs" if self.num_gpus > 0 else ""
        return f"{' with '.join(parts)}: {self.gib:.1f} GiB{more}"


def read(config: TrainConfig, key: str) -> Value:
    """The value of a dotted key."""
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    assert isinstance(node, int | float), f"{key} is a {type(node).__name__}"
    return node


def changed(config: TrainConfig, settings: Settings) -> TrainConfig:
    """A copy with other values; their ranges are not checked."""
    other = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        node: object = other
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return other


def trials(
    config: TrainConfig, candidates: Iterable[Settings], check: Check
) -> Iterator[tuple[Settings, TrainConfig]]:
    """The candidates that differ from the configuration and that `check` lets pass."""
    for settings in candidates:
        if all(read(config, key) == value for key, value in settings.items()):
            continue
        other = changed(config, settings)
        try:
            check(other)
        except ValueError:
            continue
        yield settings, other


def make(config: TrainConfig, settings: Settings, gib: float) -> Change:
    """The change, described against the configuration."""
    new = {key: value for key, value in settings.items() if read(config, key) != value}
    return Change(
        settings=new,
        before={key: read(config, key) for key in new},
        gib=gib,
        num_gpus=num_ranks(changed(config, new)) - num_ranks(config),
    )


def num_ranks(config: TrainConfig) -> int:
    """GPUs of a run: policy and critic have their own, engines unless `cluster.colocated`."""
    critic = config.algo.needs_critic and not config.validates_only
    trained = config.parallel.num_ranks * (2 if critic else 1)
    engines = config.cluster.num_engines * config.engine.tensor
    return trained + (0 if config.cluster.colocated else engines)


def _shown(value: Value) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
