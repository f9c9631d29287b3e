"""Prepare the run folder: empty for a new run, unchanged for one that continues.

    run/config.yaml                    the settings, written before anything starts
    run/starts.jsonl                   what ran: command, commits, versions (`report.run_start`)
    run/run.lock                       locked while a process runs here (`run_lock`)
    run/metrics.jsonl                  exists once the run has started
    run/checkpoints/, run/warm_start/  checkpoints (`run_state`)
    run/critic/                        the critic's part of the checkpoints, if there is one
    run/unfinished_step_rollouts.bin   trees that no checkpoint includes yet (`tree_store`)
    run/summary.json                   exists once the run is finished

An unfinished run continues if its settings are the same, except for those that only decide how and
how long it computes (`MUTABLE_KEYS`). A setting that the earlier version did not have counts as its
default. A finished run continues if it is asked for more steps or epochs. Any other run in the
folder is renamed and kept beside it. An unfinished run with a checkpoint and other settings is an
error instead, because a run of weeks should not be moved out of the way by a typing mistake.

A folder that is created here can be entered by its owner only, because rollouts, settings and logs
may hold private data. A folder that exists keeps its mode, also when its run is moved aside: to
share runs with a group, create the folder first.
"""

from __future__ import annotations

import itertools
import logging
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.experimental.callback import Callback

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FILE, list_checkpoints
from mega_agentrl.config.checks.inputs import check_run_dir
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_json, read_yaml
from mega_agentrl.report.config_diff import complete_settings, flatten_config
from mega_agentrl.train.resume.run_lock import lock_run_dir
from mega_agentrl.types.atomic_file import atomic_write

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FILE, METRICS_FILE, SUMMARY_FILE = "config.yaml", "metrics.jsonl", "summary.json"
CHECKPOINTS_DIR, WARM_START_DIR, CRITIC_DIR = "checkpoints", "warm_start", "critic"
TREE_STORE_FILE = "unfinished_step_rollouts.bin"

_logger = logging.getLogger(__name__)

MUTABLE_KEYS = (
    "run_dir",
    "total_steps",
    "total_epochs",
    "save_every_steps",
    "resume",
    "cluster.",
    "data.accept_changed_rows",
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
        CheckpointVersionError: The run would continue from checkpoints of another version.
        ValueError: The folder contains checkpoints of a run with other settings.
    """
    is_resumed, moved_to = False, None
    if (run_dir / METRICS_FILE).exists():
        is_resumed = resume and _is_resumable(run_dir, config_yaml)
        if is_resumed:  # from now on a finished run is an unfinished one
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        else:
            moved_to = _move_aside(run_dir)
    create_private_folder(run_dir)
    atomic_write(run_dir / CONFIG_FILE, config_yaml)
    return is_resumed, moved_to


def prepare_sweep_dir(folder: Path, *, resume: bool) -> Path | None:
    """Move a run aside whose folder a sweep gets, as a single run with other settings does.

    A folder in which jobs of a sweep are stays, because they may continue.

    Args:
        folder: The folder of the sweep.
        resume: Whether an unfinished run with a checkpoint is an error.

    Returns:
        Where the run was moved; None without one.

    Raises:
        ConfigError: The folder contains an unfinished run with a checkpoint, or a run that has not
            ended.
    """
    # `report` is slow to import, and this module is imported at the start of every process.
    from mega_agentrl.report.compare.run_result import find_job_dirs

    is_run = (folder / CONFIG_FILE).exists() or (folder / METRICS_FILE).exists()
    if not is_run or find_job_dirs(folder):
        return None
    if resume and _has_checkpoint(folder) and not (folder / SUMMARY_FILE).exists():
        raise ConfigError(
            "run_dir",
            f"{folder}, which has an unfinished run with a checkpoint",
            "another run_dir for the sweep, or resume=false, which moves that run aside",
            "the experiment of the sweep has the run_dir of a single run",
        )
    with lock_run_dir(folder):
        return _move_aside(folder)


def changed_keys(earlier: str, now: str) -> list[str]:
    """Return dotted keys whose values differ between two `config.yaml` texts.

    A missing key has its default. `MUTABLE_KEYS` are left out.
    """
    old_settings, new_settings = (
        flatten_config(complete_settings(yaml.safe_load(text) or {})) for text in (earlier, now)
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
    if not (run_dir / CONFIG_FILE).is_file():
        return False
    read_yaml(run_dir / CONFIG_FILE, "run_dir", "the settings of the run in that folder")
    earlier = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    keys = changed_keys(earlier, config_yaml)
    if (run_dir / SUMMARY_FILE).exists():
        return not keys and _is_longer(run_dir, earlier, config_yaml)
    if not keys:
        _intact_checkpoints(run_dir)
        return True
    if not _has_checkpoint(run_dir):
        return False
    raise ConfigError(
        "run_dir",
        f"{run_dir}, whose unfinished run has other values of {', '.join(keys)}",
        f"the same values ({CONFIG_FILE} there has them), another run_dir, or resume=false, which "
        "moves that run aside",
        "a setting was changed between two starts",
    )


def _has_checkpoint(run_dir: Path) -> bool:
    folders = (run_dir / name for name in (CHECKPOINTS_DIR, WARM_START_DIR))
    return any(any(folder.glob(f"*/{MANIFEST_FILE}")) for folder in folders)


def _is_longer(run_dir: Path, earlier: str, now: str) -> bool:
    """Return whether a finished run has a checkpoint and is asked for more steps or epochs.

    The number of steps of an epoch is unknown here: epochs after a run of steps count as more.
    """
    old, new = (complete_settings(yaml.safe_load(text)) for text in (earlier, now))
    if new["total_epochs"]:
        is_longer = bool(new["total_epochs"] > old["total_epochs"])
    else:
        num_steps = _num_finished_steps(run_dir)
        is_longer = num_steps is None or bool(new["total_steps"] > num_steps)
    return is_longer and bool(_intact_checkpoints(run_dir))


def _intact_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run; raises `CheckpointVersionError` for another version's."""
    folders = (run_dir / name for name in (CHECKPOINTS_DIR, WARM_START_DIR))
    return [path for folder in folders for path, _ in list_checkpoints(folder)]


def _num_finished_steps(run_dir: Path) -> int | None:
    """Return the number of steps of a finished run; None, with a warning, if it is unreadable."""
    path = run_dir / SUMMARY_FILE
    try:
        num_steps = read_json(path, "run_dir", "the summary of a finished run").get("num_steps")
    except ValueError as error:
        num_steps = error
    if type(num_steps) is int:
        return num_steps
    _logger.warning("%s has no number of steps, and the run continues: %s", path, num_steps)
    return None


def _move_aside(run_dir: Path) -> Path:
    """Rename the folder and create an empty one with its mode; return the new path."""
    numbered = (run_dir.with_name(f"{run_dir.name}.{k}") for k in itertools.count(1))
    moved_to = next(path for path in numbered if not path.exists())
    run_dir.rename(moved_to)
    create_private_folder(run_dir)
    run_dir.chmod(stat.S_IMODE(moved_to.stat().st_mode))
    return moved_to
