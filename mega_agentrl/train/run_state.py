"""What a run resumes from: the policy's checkpoint, with the state of everything else inside it.

    run/checkpoints/step-000020/                 model, optimizer, random state of every rank
    run/checkpoints/step-000020/manifest.json    last of all; its `extra` is the `RunState`
    run/checkpoints/warm-000100/                 of a warm start that was stopped
    run/start/step-000000/                       the same right behind the warm start; stays
    run/critic/step-000020/                      the critic's half, written before the policy's

One folder holds both halves, so that they are of the same step whatever moment a run is killed.
A folder counts from its manifest on (`actor.checkpoint_folder`), and the newest `keep` stay. With a
critic it counts where the critic's half is whole too; before the first RL step that is not needed.

The state is of the pause between two steps. Not in it: the weights in the engine (sent anew),
the reference (the warm start's weights, in `start/`, or those of `model.path`), and groups carried
over to the next step, whose prompts a restored sampler gives again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.actor import checkpoint_folder
from mega_agentrl.report.comparison import Mark
from mega_agentrl.train.run_folder import CHECKPOINTS, CRITIC, METRICS, START

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.types.ports import Critic, Policy
    from mega_agentrl.types.records import RolloutTree

FOLDER = CHECKPOINTS
KEEP = 2
_WARM = "warm-"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What training rollouts cost: tokens the policy sampled, tool calls that were run.

    A prefix that several trajectories share counts once; calls nobody could run, not at all.
    """

    num_tokens: int = 0
    num_calls: int = 0

    @classmethod
    def on(cls, trees: Iterable[RolloutTree]) -> Spent:
        """Of finished trees, failed trajectories and greedy answers included."""
        num_tokens = num_calls = 0
        for tree in trees:
            for one in tree.with_greedy:
                num_tokens += sum(one.loss_mask[one.fork_len :])
                num_calls += sum(
                    turn.outcome is not None
                    and not turn.outcome.bad_call
                    and turn.start >= one.fork_len
                    for turn in one.turns
                )
        return cls(num_tokens=num_tokens, num_calls=num_calls)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            num_tokens=self.num_tokens + other.num_tokens,
            num_calls=self.num_calls + other.num_calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two steps, beside its policy.

    step: RL steps made. controllers, sampler: as they give themselves as plain values. marks:
    the held-out evaluations of a comparison so far. version: of the weights that are served.
    session: as `Session.state` gives it. before: the held-out evaluation before RL, None where
    it is still to come. evaluated_step: the last RL step that one within RL followed, 0 for none.
    warm_start: its last step (`supervised.Imitated`) in a run that is still at it, else None.
    """

    step: int
    controllers: Mapping[str, Any]
    sampler: Mapping[str, Any]
    spent: Spent = field(default_factory=Spent)
    marks: tuple[Mark, ...] = ()
    version: int = 0
    session: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] | None = None
    warm_start: Mapping[str, Any] | None = None
    evaluated_step: int = 0

    @property
    def name(self) -> str:
        """Of its checkpoint's folder."""
        if self.warm_start is not None:
            return f"{_WARM}{self.warm_start['step']:06d}"
        return f"step-{self.step:06d}"

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and maps, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunState:
        """Back from `to_plain`; raises `ValueError` where it is none."""
        expected = {spec.name for spec in fields(cls)}
        if set(plain) != expected:
            raise ValueError(
                f"run state: got keys {sorted(plain)}, expected {sorted(expected)}; probable "
                "cause: a checkpoint without a run's state, or of another version"
            )
        try:
            marks = tuple(Mark(**mark) for mark in plain["marks"])
            spent = Spent(**plain["spent"])
        except TypeError as error:
            raise ValueError(
                f"run state: marks or spent cannot be read ({error}); probable cause: another "
                "version"
            ) from error
        return cls(
            step=int(plain["step"]),
            controllers=dict(plain["controllers"]),
            sampler=dict(plain["sampler"]),
            spent=spent,
            marks=marks,
            version=int(plain["version"]),
            session=dict(plain["session"]),
            before=None if plain["before"] is None else dict(plain["before"]),
            warm_start=None if plain["warm_start"] is None else dict(plain["warm_start"]),
            evaluated_step=int(plain["evaluated_step"]),
        )


def save(
    policy: Policy,
    run_dir: Path,
    state: RunState,
    *,
    keep: int = KEEP,
    name: str = FOLDER,
    same_policy: bool = False,
    critic: Critic | None = None,
) -> Path:
    """Write a checkpoint of the run and wait for it; older ones than the newest `keep` go.

    name: the folder of checkpoints, `START` for the one that stays. same_policy: a checkpoint of
    this step that is there holds the policy as it is now, and only the rest is written anew.
    critic: whose half goes with it.
    A damaged one of the same step, which `latest` passed over, is replaced. Raises what
    `Policy.save` raises; the checkpoints before are as they were then.
    """
    folder = run_dir / name / state.name
    whole = {path for path, _ in checkpoint_folder.finished(folder.parent)}
    if same_policy and folder in whole:
        manifest = checkpoint_folder.Manifest.read(folder)
        extra = checkpoint_folder.as_json(state.to_plain(), "extra")
        replace(manifest, extra=extra).write(folder)
        return folder
    if folder not in whole:
        (folder / checkpoint_folder.MANIFEST).unlink(missing_ok=True)
    if critic is not None and state.step:
        beside = _critic_half(folder)
        # Of a save that was cut short between the halves.
        (beside / checkpoint_folder.MANIFEST).unlink(missing_ok=True)
        # One more than of the policy's, which are one behind until theirs is written.
        critic.save(beside, {}, keep + 1)
    policy.save(folder, state.to_plain(), keep)
    return folder


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run; None where it has none."""
    return checkpoint_folder.latest(run_dir / FOLDER)


def whole_ones(run_dir: Path) -> list[Path]:
    """What a run may go on from, the furthest first; warns of what is damaged.

    A warm start that is over comes before one that was stopped in its middle.
    """
    found: list[Path] = []
    for name in (FOLDER, START):
        whole = [path for path, _ in checkpoint_folder.finished(run_dir / name)]
        found += reversed(whole)
        for manifest in sorted((run_dir / name).glob(f"*-*/{checkpoint_folder.MANIFEST}")):
            path = manifest.parent
            if path not in whole and ".partial-" not in path.name:
                _logger.warning("checkpoint %s is damaged and passed over", path)
    return sorted(found, key=is_of_warm_start)


def is_of_warm_start(folder: Path) -> bool:
    """Whether a checkpoint is of the middle of a warm start."""
    return folder.name.startswith(_WARM)


def restore_newest(
    policy: Policy, folders: Iterable[Path], critic: Critic | None = None
) -> tuple[Path, RunState] | None:
    """Take up the first checkpoint whose contents are whole; None where none is.

    What turns out to be damaged is no checkpoint from then on, with a warning. Raises what
    `restore` raises for another reason.
    """
    for folder in folders:
        try:
            return folder, restore(policy, folder, critic)
        except (RuntimeError, ValueError) as error:
            damage = _damage(folder)
            if damage is None and critic is not None and _step_of(folder):
                damage = _damage(_critic_half(folder))
            if damage is None:
                raise
            _logger.warning("checkpoint %s is passed over: %s (%s)", folder, damage, error)
            path = folder / checkpoint_folder.MANIFEST
            path.rename(path.with_suffix(".damaged"))
    return None


def restore(policy: Policy, folder: Path, critic: Critic | None = None) -> RunState:
    """Take up a checkpoint that `save` wrote: policy and critic, and the rest as returned.

    Raises `ValueError` where it holds no state of a run, and what `Policy.resume` raises.
    """
    state = RunState.from_plain(checkpoint_folder.Manifest.read(folder).extra)
    if critic is not None and state.step:
        critic.resume(_critic_half(folder))
    policy.resume(folder)
    return state


def _critic_half(folder: Path) -> Path:
    return folder.parent.parent / CRITIC / folder.name


def _step_of(folder: Path) -> int:
    return RunState.from_plain(checkpoint_folder.Manifest.read(folder).extra).step


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's contents; None where nothing is."""
    try:
        manifest = checkpoint_folder.Manifest.read(folder)
    except ValueError as error:
        return str(error)
    return checkpoint_folder.find_damage(folder, manifest, manifest.files, contents=True)


def forget_after(
    run_dir: Path,
    step: int,
    *,
    evaluated: bool = True,
    evaluated_step: int = 0,
    sft_steps: float = inf,
) -> int:
    """Take what is behind the pause after `step` out of `metrics.jsonl`; it will be made again.

    That is later RL steps, the evaluation after them and those within RL behind `evaluated_step`,
    unless the pause is `evaluated` the one before, and supervised steps behind the first
    `sft_steps`. A last line that was cut short goes too. Returns how many lines went.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if line.endswith("\n")
        and not _is_after(json.loads(line), step, evaluated, evaluated_step, sft_steps)
    ]
    if len(kept) < len(lines):
        temporary = path.with_suffix(".partial")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
    return len(lines) - len(kept)


def _is_after(
    record: Mapping[str, Any], step: int, evaluated: bool, evaluated_step: int, sft_steps: float
) -> bool:
    match record["stage"]:
        case "rl":
            return bool(record["step"] > step)
        case "sft":
            return bool(record["step"] > sft_steps)
        case "held_out_during":
            return bool(record["step"] > evaluated_step)
        case "held_out_before":
            return not evaluated
        case stage:
            return bool(stage == "held_out_after")
