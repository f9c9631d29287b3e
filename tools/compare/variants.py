"""The algorithms that are compared, as overrides of one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from mega_agentrl.config.check import check
from mega_agentrl.config.choices import LrSchedule
from mega_agentrl.config.keys import check_overrides
from mega_agentrl.config.places import config_folder
from mega_agentrl.config.schema import TrainConfig

EXPERIMENT = "experiment=compare"
MAY_DIFFER = ("algo", "rollout", "seed", "run_dir")
"""Sections in which runs that share policy, engine and tools may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One algorithm. title: in table and plot. note: what the table says below it."""

    key: str
    title: str
    overrides: tuple[str, ...]
    note: str = ""


VARIANTS = {
    variant.key: variant
    for variant in (
        Variant(key="grpo", title="GRPO", overrides=("algo=grpo",)),
        Variant(key="arpo", title="ARPO soft", overrides=("algo=arpo",)),
        Variant(key="arpo_hard", title="ARPO hard", overrides=("algo=arpo_hard",)),
        Variant(
            key="arpo_egpo",
            title="ARPO + EGPO",
            overrides=("algo=arpo", "algo.egpo.lam=0.4", "algo.egpo.blocks=response"),
            note="ARPO + EGPO: entropy of the whole response (`algo.egpo.blocks=response`), as "
            "this model writes no chain of thought between markers.",
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
    """The checked configuration, and its settings as plain values without the run's folder.

    overrides: of `experiment=compare`, or of the experiment they name. Raises `ValueError`.
    """
    folder = config_folder()
    chosen = list(overrides)
    if not any(one.startswith("experiment=") for one in chosen):
        chosen.insert(0, EXPERIMENT)
    if seed is not None:
        chosen.append(f"seed={seed}")
    check_overrides(chosen, folder)
    ConfigStore.instance().store(name="schema", node=TrainConfig)
    with initialize_config_dir(str(folder), version_base="1.3"):
        composed = compose("train", chosen)
    composed.run_dir = str(run_dir.resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    check(config)
    plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    del plain["run_dir"]
    return config, json.loads(json.dumps(plain))


def check_run(config: TrainConfig, built: TrainConfig) -> None:
    """Raise `ValueError` for a run that cannot share parts or keep to a budget of tokens.

    built: the configuration of the parts.
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
            "algo.ares.bootstrap=True: expected false in a comparison, whose budget is of what "
            "training generates; the rollouts of a bootstrap would come on top"
        )
    if config.rollout.staleness:
        raise ValueError(
            f"rollout.staleness={config.rollout.staleness}: expected 0 in a comparison, whose runs "
            "are synchronous; probable cause: a setting of the run that comes after it"
        )
    if config.algo.needs_critic:
        raise ValueError(
            f"algo.advantage={config.algo.advantage}: expected one without a critic in a "
            "comparison, whose runs share one policy that is set back to the warm start and have "
            "no such start for a critic; probable cause: algo=ppo among the algorithms"
        )
    if config.optim.schedule is not LrSchedule.constant:
        raise ValueError(
            f"optim.schedule={config.optim.schedule}: expected constant in a comparison, where "
            "the steps of a run are not known before, tokens are what it may spend"
        )


def differing(got: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two nested maps."""
    found = []
    for name in sorted({*got, *expected}):
        key, one, other = f"{prefix}{name}", got.get(name), expected.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += differing(one, other, f"{key}.")
        elif one != other:
            found.append(key)
    return found
