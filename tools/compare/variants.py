"""The compared algorithms, as overrides of one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.enums import LrSchedule
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.report.config_diff import flatten_config
from tools.preflight_parts.compose import compose_overrides

EXPERIMENT = "experiment=compare"
MAY_DIFFER = ("algo", "rollout", "seed", "run_dir")
"""Sections that may differ between runs that share policy, engine and tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One algorithm of the comparison."""

    key: str
    """Name on the command line."""
    title: str
    """Name in table and plot."""
    overrides: tuple[str, ...]
    note: str = ""
    """Remark below the table."""


VARIANTS = {
    variant.key: variant
    for variant in (
        Variant(key="grpo", title="GRPO", overrides=("algo=grpo",)),
        Variant(key="arpo", title="ARPO soft", overrides=("algo=arpo",)),
        Variant(key="arpo_hard", title="ARPO hard", overrides=("algo=arpo_hard",)),
        Variant(
            key="arpo_egpo",
            title="ARPO + EGPO",
            overrides=("algo=arpo", "algo.egpo.lam=0.4"),
            note="ARPO + EGPO: entropy of the first chain of thought, between `<think>` and "
            "`</think>`, on ARPO's trees; published EGPO samples without branching.",
        ),
        Variant(
            key="ares",
            title="ARES",
            overrides=("algo=ares", "algo.kl_coef=0.001"),
            note="ARES: `algo.ares.mode=paper` over independent rollouts, KL coefficient 0.001 "
            "at the start.",
        ),
    )
}
BASELINE = VARIANTS["grpo"]


def make_config(
    overrides: Sequence[str], *, run_dir: Path, seed: int | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """Compose and check a configuration.

    Args:
        overrides: overrides of `experiment=compare`, or of the experiment that they name.
        run_dir: folder of the run.
        seed: replaces the configured seed if given.

    Returns:
        The configuration, and its settings as plain values without the run folder.

    Raises:
        ValueError: the configuration is invalid.
    """
    chosen = list(overrides)
    if not any(override.startswith("experiment=") for override in chosen):
        chosen.insert(0, EXPERIMENT)
    if seed is not None:
        chosen.append(f"seed={seed}")
    composed = compose_overrides(chosen)
    composed.run_dir = str(run_dir.resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    check_config(config)
    plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    del plain["run_dir"]
    return config, json.loads(json.dumps(plain))


def check_run(config: TrainConfig, built: TrainConfig) -> None:
    """Check that a run can share the components and keep to a budget.

    Args:
        config: configuration of the run.
        built: configuration that the components were built from.

    Raises:
        ValueError: the run cannot be part of the comparison.
    """
    names = sorted(name for name in vars(built) if getattr(config, name) != getattr(built, name))
    if others := set(names) - set(MAY_DIFFER):
        raise ValueError(
            f"got other settings in {', '.join(sorted(others))}, expected them to be the same in "
            "all runs, which share policy, engine and tools; probable cause: an algorithm's "
            "preset that sets them"
        )
    if config.algo.ares.bootstrap:
        raise ValueError(
            "algo.ares.bootstrap=True: expected false in a comparison, whose budget does not "
            "count the rollouts of a bootstrap"
        )
    if config.rollout.max_staleness:
        raise ValueError(
            f"rollout.max_staleness={config.rollout.max_staleness}: expected 0 in a comparison, "
            "whose runs are synchronous"
        )
    if config.algo.needs_critic:
        raise ValueError(
            f"algo.advantage={config.algo.advantage}: expected one without a critic in a "
            "comparison: each run resets the policy to the checkpoint of the warm start, which "
            "has no critic; probable cause: algo=ppo among the overrides"
        )
    if config.optim.lr_schedule is not LrSchedule.constant:
        raise ValueError(
            f"optim.lr_schedule={config.optim.lr_schedule}: expected constant in a comparison, "
            "whose number of steps is not known in advance, because the budget is in tokens"
        )


def differing(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ between two nested mappings."""
    left, right = flatten_config(got), flatten_config(expected)
    return [key for key in sorted({*left, *right}) if left.get(key) != right.get(key)]
