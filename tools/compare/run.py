"""One run of the comparison: from the shared warm start until its budget is spent.

    out/warm/                     the checkpoint all runs start from, and its evaluation
    out/<algorithm>-seed<k>/      settings.json, metrics.jsonl, checkpoints/, at its end result.json

A run that was killed goes on from its newest checkpoint; one with a result is not run again.
Settings are kept beside both, and another set of settings in the same folder is an error.

The budget is one of tokens that the policy generates in training, or of steps. Held-out
evaluations come at equal shares of it, on the same questions with the same seeds in all runs;
what they generate costs nothing. A run ends with the step that spends the budget.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.report.comparison import Mark
from mega_agentrl.train import run_state
from mega_agentrl.train.controllers import Controllers, start
from mega_agentrl.train.evaluate import evaluate_held_out
from mega_agentrl.train.loop import train_step
from mega_agentrl.train.phases import open_groups
from mega_agentrl.train.run_state import RunState, Spent
from mega_agentrl.train.session import Session
from mega_agentrl.train.supervised import warm_start
from tools.compare.budget import Budget
from tools.compare.variants import differing

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.parts import Parts

SETTINGS, RESULT, EVALUATION = "settings.json", "result.json", "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all runs share. base: the configuration that `parts` were built from.

    warm: the checkpoint they start from. before: its evaluation.
    """

    parts: Parts
    base: TrainConfig
    warm: Path
    before: Mark


class CountingSession(Session):
    """A session that adds up what its steps cost."""

    def __init__(self, run_dir: Path, config: TrainConfig, spent: Spent) -> None:
        super().__init__(run_dir, config)
        self.spent = spent

    def report_step(self, step: int, collected: Any, *args: Any, **kwargs: Any) -> None:
        self.spent += Spent.on(collected.seen)
        super().report_step(step, collected, *args, **kwargs)


def warm_up(parts: Parts, base: TrainConfig, settings: dict[str, Any], folder: Path) -> Path:
    """The checkpoint that all runs start from; made where there is none yet."""
    claim(folder, settings)
    if (found := run_state.latest(folder)) is not None:
        return found
    # Of one that was killed: it begins anew.
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    with Session(folder, base) as session:
        if parts.demonstrations is not None:
            warm_start(parts, base, session)
    none = RunState(step=0, controllers={}, sampler={}, spent=Spent())
    return run_state.save(parts.policy, folder, none)


def evaluate_warm(parts: Parts, base: TrainConfig, warm: Path, folder: Path) -> Mark:
    """How the warm start does on the held-out questions; measured once, then read."""
    path = folder / EVALUATION
    if not path.is_file():
        parts.policy.resume(warm)
        _serve(parts)
        write_json(path, asdict(measure(parts, base, Spent())))
    return Mark(**json.loads(path.read_text(encoding="utf-8")))


def run_once(
    bench: Bench, config: TrainConfig, settings: dict[str, Any], budget: Budget, save_every: int
) -> tuple[Mark, ...]:
    """Run, go on with or read one run; its marks, the first before training."""
    folder = Path(config.run_dir)
    if (marks := read_result(folder, settings)) is not None:
        return marks
    prompts = PromptSampler(bench.parts.prompts.prompts, config.seed)
    state, controllers = _begin(bench, config, prompts)
    parts = replace(bench.parts, run_dir=folder, prompts=prompts)
    state = _train(parts, bench.base, config, state, controllers, budget, save_every)
    write_json(folder / RESULT, {"marks": [asdict(mark) for mark in state.marks]})
    return state.marks


def read_result(folder: Path, settings: dict[str, Any]) -> tuple[Mark, ...] | None:
    """The marks of a finished run of these settings; None where it is not finished.

    Raises `ValueError` where the folder is one of other settings.
    """
    claim(folder, settings)
    path = folder / RESULT
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Mark(**mark) for mark in values["marks"])


def _begin(
    bench: Bench, config: TrainConfig, prompts: PromptSampler
) -> tuple[RunState, Controllers]:
    """Everything as at the warm start, then as at the run's newest checkpoint, if it has one."""
    policy, folder = bench.parts.policy, Path(config.run_dir)
    policy.resume(bench.warm)
    # The reference is the warm start in a run that goes on, too.
    policy.set_objective(config.algo, config.rollout.temperature)
    controllers = start(config.algo)
    state = RunState(
        step=0,
        controllers=controllers.to_plain(),
        sampler=prompts.state_dict(),
        spent=Spent(),
        marks=(bench.before,),
    )
    if (found := run_state.latest(folder)) is not None:
        state = run_state.restore(policy, found)
        controllers = Controllers.from_plain(state.controllers)
        prompts.load_state_dict(state.sampler)
    run_state.forget_after(folder, state.step)
    _serve(bench.parts)
    return state, controllers


def _train(
    parts: Parts,
    base: TrainConfig,
    config: TrainConfig,
    state: RunState,
    controllers: Controllers,
    budget: Budget,
    save_every: int,
) -> RunState:
    folder = Path(config.run_dir)
    name = f"{folder.name}, {budget}"
    with (
        CountingSession(folder, config, state.spent) as session,
        session.stage(name, budget.num_steps or config.total_steps),
        open_groups(parts, config) as groups,
    ):
        if state.step:
            session.note(f"{folder.name}: goes on after step {state.step}")
        while budget.share(state.step, state.spent) < 1:
            step = state.step + 1
            controllers = train_step(parts, config, session, groups, controllers, step)
            marks, due = state.marks, budget.num_due(step, session.spent)
            if due >= len(marks):
                mark = measure(parts, base, session.spent)
                # A step may pass several marks at once.
                marks += (mark,) * (due + 1 - len(marks))
            state = RunState(
                step=step,
                controllers=controllers.to_plain(),
                sampler=parts.prompts.state_dict(),
                spent=session.spent,
                marks=marks,
            )
            if step % save_every == 0 or budget.share(step, state.spent) >= 1:
                run_state.save(parts.policy, folder, state)
    return state


def measure(parts: Parts, base: TrainConfig, spent: Spent) -> Mark:
    """The held-out questions with the weights that are served; seeds are those of `base`."""
    sampled = evaluate_held_out(parts, base).sampled
    return Mark(
        num_tokens=spent.num_tokens,
        num_calls=spent.num_calls,
        reward=sampled.reward,
        success=sampled.success,
    )


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder one of these settings; raises `ValueError` where it is one of others."""
    path = folder / SETTINGS
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
        return
    if keys := differing(json.loads(path.read_text(encoding="utf-8")), settings):
        raise ValueError(
            f"{folder}: got a run with other values of {', '.join(keys)}, expected the present "
            f"ones; probable cause: other arguments than the first time. Choose another --out, "
            "or remove the folder"
        )


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _serve(parts: Parts) -> None:
    parts.policy.send_weights(parts.generator, parts.generator.version + 1)
