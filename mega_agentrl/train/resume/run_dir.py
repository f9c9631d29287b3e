"""Prepare the run folder: empty for a new run, unchanged for one that continues.

    run/config.yaml                    the settings, written before anything starts
    run/metrics.jsonl                  exists once the run has started
    run/checkpoints/, run/warm_start/  checkpoints (`run_state`)
    run/critic/                        the critic's part of the checkpoints, if there is one
    run/unfinished_step_rollouts.bin   trees that no checkpoint includes yet (`tree_store`)
    run/summary.json                   exists once the run is finished

An unfinished run continues if its settings are the same, except for those that only decide how and
how long it computes (`MUTABLE_KEYS`). Any other run in the folder is renamed and kept beside it. An
unfinished run with a checkpoint and other settings is an error instead, because a run of weeks
should not be moved out of the way by a typing mistake.

A folder that is created here can be entered by its owner only, because rollouts, settings and logs
may hold private data. A folder that exists keeps its mode, also when its run is moved aside: to
share runs with a group, create the folder first.
"""

from __future__ import annotations

import itertools
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.experimental.callback import Callback

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FILE
from mega_agentrl.config.checks.inputs import check_run_dir
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.report.config_diff import flatten_config
from mega_agentrl.types.atomic_file import atomic_write

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FILE, METRICS_FILE, SUMMARY_FILE = "config.yaml", "metrics.jsonl", "summary.json"
CHECKPOINTS_DIR, WARM_START_DIR, CRITIC_DIR = "checkpoints", "warm_start", "critic"
TREE_STORE_FILE = "unfinished_step_rollouts.bin"

MUTABLE_KEYS = (
    "run_dir",
    "total_steps",
    "total_epochs",
    "save_every_steps",
    "resume",
    "cluster.",
    "engine.",
    "evaluate.every_steps",
    "batch.trees",
    "model.tree_attention",
    "optim.micro_batch_tokens",
    "parallel.",
    "report.",
    "tool.cache.",
    "tool.python.num_hosts",
    "tool.python.num_workers",
    "weight_sync.",
)
"""Settings that may change when a run continues: keys, and sections with a dot at the end."""


class PrivateFolderCallback(Callback):  # type: ignore[misc]
    """Creates the folder of a run or a sweep before Hydra does; set in `configs/train.yaml`.

    If the folder cannot be created, Hydra's own attempt, which follows, reports it.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the run folder."""
        with suppress(OSError):
            create_private_folder(Path(str(config.hydra.run.dir)))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder of the sweep, which holds those of its runs."""
        with suppress(OSError):
            create_private_folder(Path(str(config.hydra.sweep.dir)))


def create_private_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter; an existing one keeps its mode.

    Missing parents get the usual mode.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def create_run_dir(run_dir: Path) -> None:
    """Create the folder of a run or a sweep, unless it exists.

    Raises:
        ConfigError: It cannot be created, or no file can be created in it.
    """
    check_run_dir(str(run_dir))
    try:
        create_private_folder(run_dir)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(
            "run_dir",
            str(run_dir),
            "a folder in which files can be created",
            f"{error.strerror} ({error.filename or run_dir})",
        ) from error


def prepare_run_dir(run_dir: Path, config_yaml: str, *, resume: bool) -> tuple[bool, Path | None]:
    """Prepare `run_dir`.

    Args:
        run_dir: The folder. Without the metrics of a run it stays as it is.
        config_yaml: Settings of the run that starts, as they are stored in `config.yaml`.
        resume: Whether an unfinished run may continue.

    Returns:
        Whether a run continues in the folder, and where another run was moved: the first free one
        of `<name>.1`, `<name>.2`, ...

    Raises:
        ValueError: The folder contains checkpoints of a run with other settings.
    """
    is_resumed, moved_to = False, None
    if (run_dir / METRICS_FILE).exists():
        is_resumed = resume and _is_resumable(run_dir, config_yaml)
        moved_to = None if is_resumed else _move_aside(run_dir)
    create_private_folder(run_dir)
    if moved_to is not None:
        run_dir.chmod(stat.S_IMODE(moved_to.stat().st_mode))
    atomic_write(run_dir / CONFIG_FILE, config_yaml)
    return is_resumed, moved_to


def changed_keys(earlier: str, now: str) -> list[str]:
    """Return dotted keys whose values differ between two `config.yaml` texts.

    `MUTABLE_KEYS` are left out.
    """
    old_settings, new_settings = (
        flatten_config(yaml.safe_load(text) or {}) for text in (earlier, now)
    )
    return [
        key
        for key in sorted({*old_settings, *new_settings})
        if old_settings.get(key, MUTABLE_KEYS) != new_settings.get(key, MUTABLE_KEYS)
        and not any(
            key == mutable or (mutable[-1] == "." and key.startswith(mutable))
            for mutable in MUTABLE_KEYS
        )
    ]


def _is_resumable(run_dir: Path, config_yaml: str) -> bool:
    if (run_dir / SUMMARY_FILE).exists() or not (run_dir / CONFIG_FILE).is_file():
        return False
    keys = changed_keys((run_dir / CONFIG_FILE).read_text(encoding="utf-8"), config_yaml)
    if not keys:
        return True
    if not any(
        any((run_dir / name).glob(f"*/{MANIFEST_FILE}"))
        for name in (CHECKPOINTS_DIR, WARM_START_DIR)
    ):
        return False
    raise ConfigError(
        "run_dir",
        f"{run_dir}, whose unfinished run has other values of {', '.join(keys)}",
        f"the same values ({CONFIG_FILE} there has them), another run_dir, or resume=false, which "
        "moves that run aside",
        "a setting was changed between two starts",
    )


def _move_aside(run_dir: Path) -> Path:
    numbered = (run_dir.with_name(f"{run_dir.name}.{k}") for k in itertools.count(1))
    moved_to = next(path for path in numbered if not path.exists())
    run_dir.rename(moved_to)
    return moved_to
