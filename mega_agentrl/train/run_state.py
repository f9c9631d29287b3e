"""What a run resumes from: the policy's checkpoint, with the state of everything else inside it.

    run/checkpoints/step-000020/                 model, optimizer, random state of every rank
    run/checkpoints/step-000020/manifest.json    last of all; its `extra` is the `RunState`

One folder holds both halves, so that they are of the same step whatever moment a run is killed.
A folder counts from its manifest on (`actor.checkpoint_folder`), and the newest `keep` stay.

The state is of the pause between two steps. Not in it: the weights in the engine (sent anew),
the reference (made at the start as before), and groups carried over to the next step, whose
prompts a restored sampler gives again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.actor import checkpoint_folder
from mega_agentrl.report.comparison import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.types.ports import Policy
    from mega_agentrl.types.records import RolloutTree

FOLDER = "checkpoints"
KEEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What training rollouts cost: tokens the policy sampled, tool calls that were run.

    A prefix that several trajectories share counts once; calls nobody could run, not at all.
    """

    num_tokens: int = 0
    num_calls: int = 0

    @classmethod
    def on(cls, trees: Iterable[RolloutTree]) -> Spent:
        """Of finished trees, failed trajectories included."""
        num_tokens = num_calls = 0
        for tree in trees:
            for one in tree.trajectories:
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
    the held-out evaluations so far.
    """

    step: int
    controllers: Mapping[str, Any]
    sampler: Mapping[str, Any]
    spent: Spent
    marks: tuple[Mark, ...] = ()

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
        )


def save(policy: Policy, run_dir: Path, state: RunState, *, keep: int = KEEP) -> Path:
    """Write a checkpoint of the run and wait for it; older ones than the newest `keep` go.

    A damaged one of the same step, which `latest` passed over, is replaced. Raises what
    `Policy.save` raises; the checkpoints before are as they were then.
    """
    folder = run_dir / FOLDER / f"step-{state.step:06d}"
    whole = {path for path, _ in checkpoint_folder.finished(folder.parent)}
    if folder not in whole:
        (folder / checkpoint_folder.MANIFEST).unlink(missing_ok=True)
    policy.save(folder, state.to_plain(), keep)
    return folder


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run; None where it has none."""
    return checkpoint_folder.latest(run_dir / FOLDER)


def restore(policy: Policy, folder: Path) -> RunState:
    """Take up a checkpoint that `save` wrote: the policy's half, and the rest as returned.

    Raises `ValueError` where it holds no state of a run, and what `Policy.resume` raises.
    """
    state = RunState.from_plain(checkpoint_folder.Manifest.read(folder).extra)
    policy.resume(folder)
    return state


def forget_after(run_dir: Path, step: int) -> int:
    """Take the RL steps behind `step` out of `metrics.jsonl`; they will be made again.

    A last line that was cut short goes too. Returns how many lines went.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and not _is_after(line, step)]
    if len(kept) < len(lines):
        temporary = path.with_suffix(".partial")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
    return len(lines) - len(kept)


def _is_after(line: str, step: int) -> bool:
    record = json.loads(line)
    return bool(record["stage"] == "rl" and record["step"] > step)
