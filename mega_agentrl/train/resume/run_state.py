"""Checkpoints of a run: the policy's, with the state of everything else inside it.

    run/checkpoints/step-000020/                 model, optimizer, random state of every rank
    run/checkpoints/step-000020/manifest.json    written last; its `extra` is the `RunState`
    run/checkpoints/warm-000100/                 of an interrupted warm start
    run/warm_start/step-000000/                  right after the warm start; is never removed
    run/critic/step-000020/                      the critic's part, written before the policy's

Policy and run state share one folder, so that they are of the same step whenever a run is killed. A
checkpoint is valid once it has a manifest (`actor.checkpoint.checkpoint_dir`), and the newest
`keep` are kept. With a critic, its part must be valid, too, except before the first RL step.

The state is that of the boundary between two steps. It does not include the weights in the engine
(they are synced again), the reference (the weights in `warm_start/`, or those of `model.path`), or
groups carried over to the next step, whose prompts the restored sampler returns again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.actor.checkpoint import checkpoint_dir as checkpoint_folder
from mega_agentrl.report.metrics_file import iter_lines, parse_line
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.evaluate import ValidationResult
from mega_agentrl.train.resume.pending_checkpoint import ModelSave, PendingCheckpoint
from mega_agentrl.train.resume.run_dir import (
    CHECKPOINTS_DIR,
    CRITIC_DIR,
    METRICS_FILE,
    WARM_START_DIR,
)
from mega_agentrl.train.run_logger import LoggerState
from mega_agentrl.train.warm_start import WarmStartProgress
from mega_agentrl.types.atomic_file import atomic_write
from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.report.metrics_file import MetricLine
    from mega_agentrl.types.protocols import Critic, Policy

DEFAULT_CHECKPOINT_DIR = CHECKPOINTS_DIR
MAX_CHECKPOINTS = 2
_WARM_START_PREFIX = "warm-"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run between two steps, besides its policy."""

    step: int
    """Finished RL steps."""
    sampler_state: Mapping[str, Any]
    """State of the prompt sampler."""
    controllers: Controllers | None = None
    """State of the algorithm; None before the first RL step."""
    weight_version: int = 0
    """Version of the weights that the engines serve."""
    logger_state: LoggerState = field(default_factory=LoggerState)
    """State of the `RunLogger`."""
    validation_before: ValidationResult | None = None
    """Validation before RL; None if it has not been made yet."""
    warm_start_progress: WarmStartProgress | None = None
    """Last step of a run that is still in its warm start, else None."""
    last_validated_step: int = 0
    """Last RL step that was followed by a validation within RL; 0 for none."""

    @property
    def position(self) -> str:
        """Name of the last step, for messages."""
        if self.warm_start_progress is not None:
            return f"step {self.warm_start_progress.step} of the warm start"
        return f"RL step {self.step}"

    @property
    def checkpoint_name(self) -> str:
        """Name of the checkpoint's folder."""
        if self.warm_start_progress is not None:
            return f"{_WARM_START_PREFIX}{self.warm_start_progress.step:06d}"
        return f"step-{self.step:06d}"


def save_checkpoint(
    policy: Policy,
    run_dir: Path,
    state: RunState,
    *,
    keep: int = MAX_CHECKPOINTS,
    name: str = DEFAULT_CHECKPOINT_DIR,
    critic: Critic | None = None,
) -> Path:
    """Write a checkpoint of the run and wait for it; arguments are those of `start_checkpoint`."""
    pending = start_checkpoint(policy, run_dir, state, keep=keep, name=name, critic=critic)
    assert pending is not None
    try:
        pending.commit()
    except Exception:
        pending.abandon()
        raise
    return pending.folder


def start_checkpoint(
    policy: Policy,
    run_dir: Path,
    state: RunState,
    *,
    keep: int = MAX_CHECKPOINTS,
    name: str = DEFAULT_CHECKPOINT_DIR,
    same_policy: bool = False,
    critic: Critic | None = None,
) -> PendingCheckpoint | None:
    """Start a checkpoint of the run, whose commit removes older ones than the newest `keep`.

    A damaged checkpoint of the same step is replaced. If saving fails, older checkpoints are
    unchanged.

    Args:
        policy: Saves its own state and `state`.
        run_dir: Folder of the run.
        state: The rest of the run.
        keep: Number of checkpoints to keep.
        name: Folder of the checkpoints; `WARM_START_DIR` for the one that is never removed.
        same_policy: An existing checkpoint of this step holds the current policy; only `state` is
            written again.
        critic: Its part is saved, too.

    Returns:
        The checkpoint, to be committed; None with `same_policy`, if it is complete.
    """
    folder = run_dir / name / state.checkpoint_name
    valid = {path for path, _ in checkpoint_folder.list_checkpoints(folder.parent)}
    if same_policy and folder in valid:
        manifest = checkpoint_folder.CheckpointManifest.read(folder)
        replace(manifest, extra=to_builtins(state)).write(folder)
        return None
    if folder not in valid:
        checkpoint_folder.invalidate_checkpoint(folder)
    parts: list[ModelSave] = []
    if critic is not None and state.step:
        critic_folder = _critic_checkpoint_dir(folder)
        # The manifest may be left from a save that was interrupted between the two parts.
        checkpoint_folder.invalidate_checkpoint(critic_folder)
        # One more than the policy, whose newest checkpoint is written after this one.
        parts.append(ModelSave(critic, critic_folder, {}, keep + 1))
    try:
        parts.append(ModelSave(policy, folder, to_builtins(state), keep))
    except Exception:
        for part in parts:
            part.abandon()
        raise
    return PendingCheckpoint(state.step, parts)


def valid_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints to continue from, the most advanced first; warn of damaged ones.

    A finished warm start comes before an interrupted one.
    """
    checkpoints: list[Path] = []
    for name in (DEFAULT_CHECKPOINT_DIR, WARM_START_DIR):
        valid = [path for path, _ in checkpoint_folder.list_checkpoints(run_dir / name)]
        checkpoints += reversed(valid)
        for manifest in sorted((run_dir / name).glob(f"*-*/{checkpoint_folder.MANIFEST_FILE}")):
            path = manifest.parent
            if path not in valid and ".partial-" not in path.name:
                _logger.warning("checkpoint %s is damaged and skipped", path)
    return sorted(checkpoints, key=is_mid_warm_start)


def is_mid_warm_start(folder: Path) -> bool:
    """Return whether a checkpoint is of an interrupted warm start."""
    return folder.name.startswith(_WARM_START_PREFIX)


def load_newest_checkpoint(
    policy: Policy, folders: Iterable[Path], critic: Critic | None = None
) -> tuple[Path, RunState] | None:
    """Load the first checkpoint whose contents are undamaged; None if there is none.

    Damaged checkpoints are invalidated, with a warning. Errors for any other reason are raised.
    """
    for folder in folders:
        try:
            return folder, load_checkpoint(policy, folder, critic)
        except (RuntimeError, ValueError) as error:
            damage = _find_damage(folder)
            if damage is None and critic is not None and read_run_state(folder).step:
                damage = _find_damage(_critic_checkpoint_dir(folder))
            if damage is None:
                raise
            _logger.warning("checkpoint %s is skipped: %s (%s)", folder, damage, error)
            path = folder / checkpoint_folder.MANIFEST_FILE
            if not folder.is_symlink():  # the folder elsewhere stays as it is
                path.rename(path.with_suffix(".damaged"))
    return None


def load_checkpoint(policy: Policy, folder: Path, critic: Critic | None = None) -> RunState:
    """Load policy and critic from a checkpoint, and return the rest.

    Raises:
        ValueError: The checkpoint contains no state of a run.
    """
    state = read_run_state(folder)
    if critic is not None and state.step:
        critic.load_checkpoint(_critic_checkpoint_dir(folder))
    policy.load_checkpoint(folder)
    return state


def read_run_state(folder: Path) -> RunState:
    """Read the state of the run from a checkpoint.

    Raises:
        ValueError: The checkpoint contains none.
    """
    extra = checkpoint_folder.CheckpointManifest.read(folder).extra
    return from_builtins(RunState, extra, f"state of the run in {folder}")


def _critic_checkpoint_dir(folder: Path) -> Path:
    return folder.parent.parent / CRITIC_DIR / folder.name


def _find_damage(folder: Path) -> ValueError | None:
    """Return what is wrong with a checkpoint's contents; None if nothing is."""
    try:
        manifest = checkpoint_folder.CheckpointManifest.read(folder)
    except ValueError as error:
        return error
    return checkpoint_folder.find_damage(folder, manifest, manifest.files, contents=True)


def truncate_metrics(
    run_dir: Path,
    step: int,
    *,
    has_validation_before: bool = True,
    last_validated_step: int = 0,
    sft_steps: float = inf,
) -> int:
    """Remove the lines from `metrics.jsonl` that the continued run will write again.

    Lines that cannot be read, such as an incomplete last one, are removed, too, with one warning.

    Args:
        run_dir: Folder of the run.
        step: Later RL steps are removed, and the validation after RL.
        has_validation_before: Whether the validation before RL is kept.
        last_validated_step: Later validations within RL are removed.
        sft_steps: Later supervised steps are removed.

    Returns:
        The number of removed lines.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return 0
    num_lines, num_unreadable, remaining = 0, 0, []
    with path.open("rb") as file:
        for text in iter_lines(file):
            num_lines += 1
            line = parse_line(text)
            if line is None or not text.endswith(b"\n"):
                num_unreadable += 1
            elif not _is_line_after(
                line, step, has_validation_before, last_validated_step, sft_steps
            ):
                remaining.append(text)
    if num_unreadable:
        _logger.warning("%s: %d lines cannot be read and are removed", path, num_unreadable)
    if len(remaining) < num_lines or path.is_symlink():
        atomic_write(path, b"".join(remaining))
    return num_lines - len(remaining)


def _is_line_after(
    line: MetricLine,
    step: int,
    has_validation_before: bool,
    last_validated_step: int,
    sft_steps: float,
) -> bool:
    match line.stage:
        case "rl":
            return line.step > step
        case "sft":
            return line.step > sft_steps
        case "held_out_during":
            return line.step > last_validated_step
        case "held_out_before":
            return not has_validation_before
        case stage:
            return stage == "held_out_after"
