"""The tasks and algorithms of the comparison, as configurations that are checked before a run.

A task is an experiment, an algorithm is a preset (`algo=NAME`), to which overrides may be added
with `+`, as in `arpo+algo.egpo.lam=0.4`. A preset that cannot run on a task, or would do the same
as another there, is skipped with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.enums import Branching, LrSchedule
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.errors import InputError
from mega_agentrl.report.config_diff import flatten_config
from tools.preflight_parts.compose import compose_overrides

if TYPE_CHECKING:
    from tools.compare.budget import Budget

BASELINE = "grpo"
SHARED_OVERRIDES = (
    "total_steps=200",  # more than the budget of tokens allows
    "optim.num_minibatches=2",  # with one, all ratios are 1, and nothing is ever clipped
    "report.save_trees_every_steps=0",
    "report.trackers=[]",
)
PRESET_OVERRIDES = {
    "ares": ("algo.kl_coef=0.001",),  # without it there is no KL to weigh
    "ppo": ("optim.critic_lr=1e-3",),  # the default is for models of billions of parameters
}
MAY_DIFFER = ("algo", "rollout", "seed", "run_dir")
"""Sections that may differ between runs that share policy, engine and tools."""
_LR_KEY = "optim.lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareTask:
    """A task that all algorithms are trained on."""

    key: str
    """Name on the command line, and of the folder."""
    title: str
    experiment: str
    generated: str
    """Arguments of `tools/make_tiny_model.py` that write its input."""


TASKS = {
    task.key: task
    for task in (
        CompareTask(
            key="toolqa", title="Tool-QA", experiment="smoke", generated="--out runs/toolqa"
        ),
        CompareTask(
            key="calls",
            title="Function calling",
            experiment="smoke_calls",
            generated="--out runs/calls --task calls",
        ),
        CompareTask(
            key="orders",
            title="Order game",
            experiment="smoke_orders",
            generated="--out runs/orders --task orders",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of the command line that hold for all runs."""

    out: Path
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    """Rates to choose from; a single one needs no tuning."""
    tuning_seed: int
    """Seed of the tuning runs, which are not scored."""
    budget: Budget
    save_every: int
    """Steps between two checkpoints."""
    overrides: tuple[str, ...]
    """Overrides of all runs."""
    results: Path | None = None
    """File of finished runs that other machines read and extend (`result_file`)."""
    commit: str = "unknown"
    """Commit of this code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One algorithm on one task with one seed and one learning rate."""

    algorithm: str
    learning_rate: float
    seed: int
    is_tuning: bool
    """Whether the run is evaluated on the development questions, and not scored."""
    config: TrainConfig
    settings: dict[str, Any]
    """The settings stored in the run's folder; the folder refuses a run with others."""

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.algorithm}, seed {self.seed}, learning rate {self.learning_rate:g}"


def list_presets() -> list[str]:
    """Return the names of all presets of `algo=`, the baseline first."""
    names = sorted(path.stem for path in (find_config_dir() / "algo").glob("*.yaml"))
    return [BASELINE, *(name for name in names if name != BASELINE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConfig:
    """A configuration, and its settings as plain values without the folder."""

    config: TrainConfig
    settings: dict[str, Any]

    def with_learning_rate(self, learning_rate: float) -> CheckedConfig:
        """Return a copy with another learning rate."""
        optim = replace(self.config.optim, lr=learning_rate)
        return CheckedConfig(
            config=replace(self.config, optim=optim),
            settings={**self.settings, "optim": {**self.settings["optim"], "lr": learning_rate}},
        )


def make_task_config(task: CompareTask, options: CompareOptions) -> CheckedConfig:
    """Return the configuration of the baseline on a task, in the folder of the task.

    Raises:
        ValueError: the configuration is invalid.
    """
    return _compose(task, (f"algo={BASELINE}", *options.overrides), options.out / task.key)


def make_algorithm_config(
    task: CompareTask, options: CompareOptions, algorithm: str
) -> CheckedConfig:
    """Return the configuration of an algorithm on a task, in the folder of the task.

    Raises:
        ValueError: the configuration is invalid.
    """
    preset, *added = algorithm.split("+")
    overrides = (f"algo={preset}", *PRESET_OVERRIDES.get(preset, ()), *added, *options.overrides)
    return _compose(task, overrides, options.out / task.key)


def plan_run(
    algorithm: str,
    checked: CheckedConfig,
    options: CompareOptions,
    *,
    seed: int,
    learning_rate: float,
    is_tuning: bool = False,
) -> PlannedRun:
    """Return a run of an algorithm whose configuration has been checked."""
    checked = checked.with_learning_rate(learning_rate)
    name = f"{algorithm.replace('/', '_')}-lr{learning_rate:g}-seed{seed}"
    folder = Path(checked.config.run_dir) / ("tuning" if is_tuning else "runs") / name
    return PlannedRun(
        algorithm=algorithm,
        learning_rate=learning_rate,
        seed=seed,
        is_tuning=is_tuning,
        config=replace(checked.config, seed=seed, run_dir=str(folder)),
        settings={**checked.settings, "seed": seed, "budget": asdict(options.budget)},
    )


def find_skip_reason(config: TrainConfig, base: TrainConfig) -> str | None:
    """Return why an algorithm cannot run on a task, or adds nothing there; None if it can.

    Args:
        config: The algorithm's configuration.
        base: The baseline's.
    """
    try:
        check_run(config, base)
    except ValueError as error:
        return str(error)
    rollout = config.rollout
    asks_user = bool(rollout.interaction_config_file) and rollout.branch.after_user_messages
    if rollout.branching != Branching.none and not rollout.max_tool_calls and not asks_user:
        return "it forks after a tool's answer, of which the task has none"
    if config.algo.advantage == "gigpo" and rollout.max_turns == 1:
        return "it compares turns, and the task has one"
    return None


def make_component_config(config: TrainConfig, base: TrainConfig) -> TrainConfig:
    """Return what the components of a run are built from.

    Args:
        config: Configuration of the run.
        base: The baseline's, which is returned unless the run trains a critic.
    """
    if not config.algo.needs_critic:
        return base
    optim = replace(base.optim, critic_lr=config.optim.critic_lr)
    return replace(base, algo=config.algo, optim=optim)


def check_run(config: TrainConfig, base: TrainConfig) -> None:
    """Check that a run can share the components and keep to a budget.

    Args:
        config: Configuration of the run.
        base: The baseline's.

    Raises:
        ValueError: The run cannot be part of the comparison.
    """
    built = make_component_config(config, base)
    names = sorted(name for name in vars(built) if getattr(config, name) != getattr(built, name))
    if others := set(names) - set(MAY_DIFFER):
        raise InputError(
            "settings of an algorithm",
            f"other {', '.join(sorted(others))}",
            "the same in all runs, which share policy, engine and tools",
            "an algorithm's preset that sets them",
        )
    if config.algo.ares.bootstrap:
        raise ConfigError(
            "algo.ares.bootstrap",
            True,
            "false in a comparison, whose budget does not count the rollouts of a bootstrap",
        )
    if config.rollout.max_staleness:
        raise ConfigError(
            "rollout.max_staleness",
            config.rollout.max_staleness,
            "0 in a comparison, whose runs are synchronous",
        )
    if config.optim.lr_schedule is not LrSchedule.constant:
        raise ConfigError(
            "optim.lr_schedule",
            config.optim.lr_schedule,
            "constant in a comparison, whose number of steps is not known in advance, because the "
            "budget is in tokens",
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise `InputError` for an override of what the comparison itself chooses."""
    reserved = {"algo": "--algos", "experiment": "--tasks", "seed": "--seeds", _LR_KEY: "--rates"}
    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if key in reserved:
            raise InputError(override, key, f"{reserved[key]} in a comparison")


def differing_keys(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ between two nested mappings."""
    left, right = flatten_config(got), flatten_config(expected)
    return [key for key in sorted({*left, *right}) if left.get(key) != right.get(key)]


def _compose(task: CompareTask, overrides: Sequence[str], run_dir: Path) -> CheckedConfig:
    composed = compose_overrides([f"experiment={task.experiment}", *SHARED_OVERRIDES, *overrides])
    composed.run_dir = str(run_dir.resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    check_config(config)
    plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    del plain["run_dir"]
    return CheckedConfig(config=config, settings=json.loads(json.dumps(plain)))
