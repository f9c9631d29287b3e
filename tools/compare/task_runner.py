"""All runs of a task: first those that choose a learning rate, then the scored ones.

Each algorithm is tuned alike: one run for each learning rate, with a seed that is not scored. The
rate with the highest reward on the development questions at the end is chosen, and among equal ones
the lowest.

Runs with the same learning rate share policy, engine and tools, which are started once for them,
and once more for each algorithm with a critic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import RunCostCurve
from mega_agentrl.report.compare.scoreboard import TaskScores
from mega_agentrl.report.progress import format_duration
from tools.compare.plan import (
    CheckedConfig,
    CompareOptions,
    CompareTask,
    PlannedRun,
    find_skip_reason,
    make_algorithm_config,
    make_component_config,
    make_task_config,
    plan_run,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.report.compare.algorithms import EvalCostPoint
    from mega_agentrl.types.components import Components
    from tools.compare.result_file import ResultFile
    from tools.compare.run import ComparisonSetup, FinishedRun

_REWARD_TOLERANCE = 0.004
"""Largest difference of two evaluations of the same weights: the engine's log-probs depend on the
batch in their last bits, which occasionally changes a token."""


@dataclass(slots=True, kw_only=True)
class TaskRunner:
    """Runs what is missing of a task, and keeps the results."""

    task: CompareTask
    options: CompareOptions
    base: CheckedConfig
    """Configuration of the baseline, with which the warm start is made and evaluated."""
    algorithms: dict[str, CheckedConfig] = field(default_factory=dict)
    """Configurations of the algorithms that can run on the task."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why the other algorithms cannot run on the task, by name."""
    on_result: Callable[[], object] = lambda: None
    """Called after each scored run."""
    finished: list[tuple[PlannedRun, FinishedRun]] = field(default_factory=list)

    @classmethod
    def plan(
        cls, task: CompareTask, options: CompareOptions, algorithms: Sequence[str]
    ) -> TaskRunner:
        """Check the configurations of all algorithms on the task.

        Raises:
            ValueError: the task's configuration is invalid.
        """
        base = make_task_config(task, options)
        runner = cls(task=task, options=options, base=base)
        for name in algorithms:
            try:
                checked = make_algorithm_config(task, options, name)
            except ValueError as error:
                runner.skipped[name] = str(error)
                continue
            reason = find_skip_reason(checked.config, base.config)
            if reason is None:
                runner.algorithms[name] = checked
            else:
                runner.skipped[name] = reason
        return runner

    @property
    def tuning_runs(self) -> list[PlannedRun]:
        """The runs that choose a learning rate; none if there is only one."""
        options = self.options
        if len(options.learning_rates) == 1:
            return []
        return [
            plan_run(
                name, checked, options, seed=options.tuning_seed, learning_rate=rate, is_tuning=True
            )
            for rate in options.learning_rates
            for name, checked in self.algorithms.items()
        ]

    @property
    def tuning_rewards(self) -> dict[str, dict[float, float]]:
        """Reward on the development questions by algorithm and learning rate, of finished runs."""
        rewards: dict[str, dict[float, float]] = {}
        for run, result in self.finished:
            if run.is_tuning:
                by_rate = rewards.setdefault(run.algorithm, {})
                by_rate[run.learning_rate] = result.evaluations[-1].reward
        return rewards

    @property
    def learning_rates(self) -> dict[str, float]:
        """The chosen learning rate by algorithm; those that are not tuned yet are left out."""
        rates = self.options.learning_rates
        if len(rates) == 1:
            return dict.fromkeys(self.algorithms, rates[0])
        return {
            name: choose_learning_rate(by_rate)
            for name, by_rate in self.tuning_rewards.items()
            if len(by_rate) == len(rates)
        }

    @property
    def scored_runs(self) -> list[PlannedRun]:
        """The scored runs of all tuned algorithms, seed by seed."""
        rates = self.learning_rates
        return [
            plan_run(name, checked, self.options, seed=seed, learning_rate=rates[name])
            for seed in self.options.seeds
            for name, checked in self.algorithms.items()
            if name in rates
        ]

    def read_finished(self) -> None:
        """Read the results that the folders and the file of results have.

        Raises:
            ValueError: a folder belongs to a run with other settings, or a line is not a result.
        """
        # Imported here as below: torch is loaded only after the configurations have been checked.
        from tools.compare.run import read_result

        file = self._result_file()
        for list_runs in (lambda: self.tuning_runs, lambda: self.scored_runs):
            for run in list_runs():
                result = None if file is None else file.find(self.task.key, run)
                if result is None:
                    result = read_result(Path(run.config.run_dir), run.settings)
                if result is not None:
                    self.finished.append((run, result))

    def run_missing(self) -> None:
        """Run everything that is not finished."""
        self._run_all(self.tuning_runs)
        self._run_all(self.scored_runs)

    def scores(self) -> TaskScores:
        """Return the scores of the finished runs, in the order of the algorithms."""
        scored = [(run, result) for run, result in self.finished if not run.is_tuning]
        order = list(self.algorithms)
        scored.sort(key=lambda item: (order.index(item[0].algorithm), item[0].seed))
        return TaskScores(
            title=self.task.title,
            curves=[
                RunCostCurve(algorithm=run.algorithm, seed=run.seed, eval_points=result.evaluations)
                for run, result in scored
            ],
            learning_rates=self.learning_rates,
            tuning_rewards=self.tuning_rewards,
            skipped=self.skipped,
            stopped={run.name: result.stop_reason for run, result in scored if result.stop_reason},
        )

    def _run_all(self, runs: Sequence[PlannedRun]) -> None:
        names = {(run.name, run.is_tuning) for run, _ in self.finished}
        missing = [run for run in runs if (run.name, run.is_tuning) not in names]
        groups: list[tuple[TrainConfig, list[PlannedRun]]] = []
        for run in missing:
            base = self.base.with_learning_rate(run.learning_rate).config
            built = make_component_config(run.config, base)
            shared = next((group for config, group in groups if config == built), None)
            if shared is None:
                groups.append((built, [run]))
            else:
                shared.append(run)
        for built, group in groups:
            self._run_group(group, built)

    def _run_group(self, runs: Sequence[PlannedRun], built: TrainConfig) -> None:
        """Start the components that these runs share from their configuration, and run them."""
        from mega_agentrl.runtime.build import build
        from mega_agentrl.runtime.cluster import ClusterConnection
        from mega_agentrl.runtime.inputs import read_inputs
        from tools.compare.run import run_once

        options = self.options
        with (
            ClusterConnection(built) as cluster,
            build(built, read_inputs(built), cluster) as parts,
        ):
            setup = self._make_setup(parts, is_tuning=runs[0].is_tuning)
            for run in runs:
                start_s = time.monotonic()
                result = run_once(
                    setup, run.config, run.settings, options.budget, options.save_every
                )
                self._add_finished(run, result)
                last = result.evaluations[-1]
                print(
                    f"{self.task.key}: {run.name}{' (tuning)' if run.is_tuning else ''}: reward "
                    f"{last.reward:.3f} after {last.num_tokens:,} tokens and "
                    f"{last.num_tool_calls:,} tool calls, "
                    f"{format_duration(time.monotonic() - start_s)}",
                    flush=True,
                )
                if not run.is_tuning:
                    self.on_result()

    def _make_setup(self, parts: Components, *, is_tuning: bool) -> ComparisonSetup:
        from tools.compare.run import ComparisonSetup, evaluate_warm, make_warm_start

        base = self.base.config
        folder = Path(base.run_dir) / "warm"
        warm = make_warm_start(parts, base, self.base.settings, folder)
        questions = "dev" if is_tuning else "validation"
        if is_tuning:
            parts = replace(parts, validation_prompts=parts.dev_prompts)
        before = evaluate_warm(parts, base, warm, folder / f"{questions}.json")
        self._check_same_start(before, is_tuning=is_tuning)
        return ComparisonSetup(
            components=parts, base_config=base, warm_start_folder=warm, initial_evaluation=before
        )

    def _result_file(self) -> ResultFile | None:
        from tools.compare.result_file import ResultFile

        return None if self.options.results is None else ResultFile(self.options.results)

    def _add_finished(self, run: PlannedRun, result: FinishedRun) -> None:
        self.finished.append((run, result))
        if (file := self._result_file()) is not None:
            file.append(self.task.key, run, result, self.options.commit)

    def _check_same_start(self, before: EvalCostPoint, *, is_tuning: bool) -> None:
        """Check that finished runs started from the warm start that was evaluated here.

        Raises:
            ValueError: A run started from another reward.
        """
        for run, result in self.finished:
            start = result.evaluations[0]
            if run.is_tuning == is_tuning and abs(start.reward - before.reward) > _REWARD_TOLERANCE:
                raise InputError(
                    f"{self.task.key}: reward from which {run.name} started",
                    round(start.reward, 4),
                    f"{before.reward:.4f}, which the warm start has here",
                    "its result is of another version or another kind of processor. Choose another "
                    "--results to start anew",
                )


def choose_learning_rate(reward_by_rate: Mapping[float, float]) -> float:
    """Return the rate with the highest reward, among equal ones the lowest."""
    return max(sorted(reward_by_rate), key=lambda rate: reward_by_rate[rate])
