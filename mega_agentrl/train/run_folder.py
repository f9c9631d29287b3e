"""Whose a run folder is: empty for a new run, as it stands for one that goes on.

    run/config.yaml       the settings, written before anything starts
    run/metrics.jsonl     there since the run began
    run/checkpoints/, run/start/    what it goes on from (`run_state`)
    run/critic/                     the critic's half of these, where there is one
    run/kept_rollouts.bin trees that no checkpoint has yet (`rollout.tree_store`)
    run/summary.json      it is finished

A run goes on where it is unfinished and of the same settings, but for those that decide on how
and how long it computes and not on what (`MAY_DIFFER`). Any other run in the folder is kept
beside it, unless it has a checkpoint and other settings: that is an error, as a run of weeks
should not move out of the way for a typing mistake.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mega_agentrl.actor.checkpoint_folder import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
CHECKPOINTS, START, CRITIC = "checkpoints", "start", "critic"
KEPT_TREES = "kept_rollouts.bin"

MAY_DIFFER = (
    "run_dir",
    "total_steps",
    "epochs",
    "save_every",
    "resume",
    "cluster.",
    "engine.",
    "evaluate.every",
    "optim.micro_batch_tokens",
    "parallel.",
    "report.",
    "tool.cache.",
    "tool.python.hosts",
    "tool.python.workers",
    "weights.",
)
"""Settings that a run may go on without: keys, and sections with a dot at the end."""


def make_room(run_dir: Path, config_yaml: str, *, resume: bool) -> tuple[bool, Path | None]:
    """Make `run_dir` ready; returns whether a run goes on in it, and where another one went.

    config_yaml: the settings of the run that begins, as they are kept in `config.yaml`. What is
    kept aside is renamed to the first free of `<name>.1`, `<name>.2`, ...; a folder without
    metrics of a run stays as it is. Raises `ValueError` for checkpoints of other settings.
    """
    goes_on, moved = False, None
    if (run_dir / METRICS).exists():
        goes_on = resume and _goes_on(run_dir, config_yaml)
        moved = None if goes_on else _keep_aside(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / CONFIG, config_yaml)
    return goes_on, moved


def differing(earlier: str, now: str) -> list[str]:
    """Dotted keys, `MAY_DIFFER` aside, whose values differ between two `config.yaml` texts."""
    one, other = dict(_leaves(yaml.safe_load(earlier))), dict(_leaves(yaml.safe_load(now)))
    return [
        key
        for key in sorted({*one, *other})
        if one.get(key, MAY_DIFFER) != other.get(key, MAY_DIFFER)
        and not any(key == may or (may[-1] == "." and key.startswith(may)) for may in MAY_DIFFER)
    ]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was before."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _goes_on(run_dir: Path, config_yaml: str) -> bool:
    if (run_dir / SUMMARY).exists() or not (run_dir / CONFIG).is_file():
        return False
    keys = differing((run_dir / CONFIG).read_text(encoding="utf-8"), config_yaml)
    if not keys:
        return True
    if not any(any((run_dir / name).glob(f"*/{MANIFEST}")) for name in (CHECKPOINTS, START)):
        return False
    raise ValueError(
        f"run_dir={run_dir}: got other values of {', '.join(keys)} than the unfinished run in "
        f"it, expected the same ({CONFIG} there has them); probable cause: a setting was changed "
        "between two starts. Choose another run_dir, or resume=false, which keeps that run aside"
    )


def _keep_aside(run_dir: Path) -> Path:
    numbered = (run_dir.with_name(f"{run_dir.name}.{k}") for k in itertools.count(1))
    moved = next(path for path in numbered if not path.exists())
    run_dir.rename(moved)
    return moved


def _leaves(tree: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in (tree or {}).items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
