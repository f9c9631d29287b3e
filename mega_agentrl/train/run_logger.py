"""Output of a run: metrics, progress lines, tables, the reward curve and the summary.

`RunLogger` receives records from the loop and passes them on to `report` and `output`; the loop
does not depend on anything it computes. Files in the run folder: `metrics.jsonl`, `summary.json`,
`reward.png`, `rollouts.txt`, `rollouts/` and `report.html` (`output.report_page`). The trackers are
owned and closed by the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from mega_agentrl.report.metrics_file import FIRST_FAILURE_METRIC, read_metrics
from mega_agentrl.report.progress import StageProgress, StepSummary, format_duration
from mega_agentrl.report.reward_curve import EvalPoint, StepPoint, write_reward_curve
from mega_agentrl.report.validation_console import (
    EvalSummary,
    ScoredCount,
    print_eval_comparison,
    print_evaluation,
)
from mega_agentrl.rollout.io.render import render_trajectory
from mega_agentrl.rollout.metrics.entropy import EntropyCurves, collect_entropy_curves
from mega_agentrl.rollout.metrics.failures import FailureCounts, count_failures
from mega_agentrl.rollout.metrics.names import NamesOfRun
from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.train.advantages import mismatch_metrics
from mega_agentrl.train.output.metric_writer import (
    MetricWriter,
    PhaseTimer,
    ThroughputMeter,
    json_text,
)
from mega_agentrl.train.output.report_page import write_report
from mega_agentrl.train.output.rollout_files import RolloutWriter
from mega_agentrl.train.resume.run_dir import METRICS_FILE, SUMMARY_FILE
from mega_agentrl.types.atomic_file import atomic_write
from mega_agentrl.types.monitoring import Monitors
from mega_agentrl.types.serialization import to_builtins

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
    from mega_agentrl.train.evaluate import ValidationResult
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.records import RolloutTree


NUM_PRINTED_ROLLOUTS = 3
"""Number of rollouts printed at the end."""

TRAINING_STAGES = ("warm start", "RL")
"""Stages whose seconds add up to `train_seconds` of the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenLine:
    """Metrics of an RL step whose line in `metrics.jsonl` follows after its checkpoint."""

    step: int
    metrics: Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerState:
    """Data of the steps so far that the final summary needs."""

    step_points: tuple[StepPoint, ...] = ()
    """Reward and success of each RL step."""
    eval_points: tuple[EvalPoint, ...] = ()
    """Validations within RL."""
    logprob_mismatches: tuple[float, ...] = ()
    """`mismatch/logp_mean_abs` of each RL step."""
    entropy_curves: EntropyCurves = field(default_factory=EntropyCurves)
    """Sum of all RL steps."""
    failures: FailureCounts = field(default_factory=FailureCounts)
    """Failed trajectories of all RL steps."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, including the one that is running."""
    unwritten_line: UnwrittenLine | None = None
    """The last step, with the seconds so far, if its line is not in the file yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnfinishedStep:
    """An RL step that is logged but not written, because its checkpoint takes time, too."""

    step: int
    metrics: Mapping[str, float | str]
    batch: TrainBatch
    displayed: Mapping[str, float]
    """Metrics of the progress line."""
    warning: str


class RunLogger:
    """Logger of one run; a context manager."""

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        console: Console | None = None,
        monitors: Monitors | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.phase_timer = PhaseTimer()
        self._config = config
        self._console = console or Console()
        self._monitors = monitors or Monitors()
        self._writer = MetricWriter(run_dir, self._monitors.trackers)
        self._throughput = ThroughputMeter(config, self._monitors.gpu_name)
        self._progress: StageProgress | None = None
        self._step_points: list[StepPoint] = []
        self._eval_points: list[EvalPoint] = []
        self._logprob_mismatches: list[float] = []
        self._rollout_writer = RolloutWriter(run_dir, config)
        self._entropy_curves = EntropyCurves()
        self._failures = FailureCounts()
        self.metric_names = NamesOfRun()
        """Names of others in the metrics of the run."""
        self._last_trees: Sequence[RolloutTree] = ()
        self._stage_s: dict[str, float] = {}
        self._running_stage: tuple[str, float] | None = None
        self._unfinished_step: _UnfinishedStep | None = None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def state(self) -> LoggerState:
        """Return the data of the steps so far that the final summary needs."""
        stage_s = dict(self._stage_s)
        if self._running_stage is not None:
            title, start_s = self._running_stage
            stage_s[title] = stage_s.get(title, 0.0) + time.perf_counter() - start_s
        line = None
        if (unfinished := self._unfinished_step) is not None:
            seconds = self.phase_timer.seconds
            metrics = self._step_metrics(unfinished, seconds) | _time_metrics(seconds)
            line = UnwrittenLine(step=unfinished.step, metrics=metrics)
        return LoggerState(
            step_points=tuple(self._step_points),
            eval_points=tuple(self._eval_points),
            logprob_mismatches=tuple(self._logprob_mismatches),
            entropy_curves=self._entropy_curves,
            failures=self._failures,
            stage_s=stage_s,
            unwritten_line=line,
        )

    def load_state(self, state: LoggerState) -> None:
        """Continue from what `state` returned; write the line that was not written."""
        line = state.unwritten_line
        if line is not None:
            written = read_metrics(self.run_dir / METRICS_FILE).lines_of_stage("rl")
            if all(earlier.step != line.step for earlier in written):
                self._writer.write("rl", line.step, line.metrics)
        self._step_points = list(state.step_points)
        self._eval_points = list(state.eval_points)
        self._logprob_mismatches = list(state.logprob_mismatches)
        self._entropy_curves = state.entropy_curves
        self._failures = state.failures
        self._stage_s = dict(state.stage_s)

    def log_startup(self, seconds: float) -> None:
        """Record how long the start took."""
        self._stage_s["start"] = self._stage_s.get("start", 0.0) + seconds

    @contextmanager
    def stage(self, title: str, num_steps: int, *, num_done: int = 0) -> Iterator[None]:
        """Show and time a stage of the run; `num_done` steps were made before this start."""
        start_s = time.perf_counter()
        self._running_stage = (title, start_s)
        progress = StageProgress(title, num_steps, console=self._console, num_done=num_done)
        try:
            with progress as self._progress:
                yield
                self.finish_step()
        finally:
            self._running_stage = None
            before_s = self._stage_s.get(title, 0.0)
            self._stage_s[title] = before_s + time.perf_counter() - start_s
        self.phase_timer.pop_seconds()

    def print_line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False)

    def log_bootstrap_progress(self, num_done: int, num_chunks: int) -> None:
        """Show the progress of the bootstrap pass, inside its stage."""
        self._show_progress(
            num_done, {"done": num_done / num_chunks}, self.phase_timer.pop_seconds(), 0
        )

    def log_sft_step(self, step: int, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """Write and show one supervised step."""
        phase_s = self.phase_timer.pop_seconds()
        self._write_metrics("sft", step, metrics, phase_s)
        displayed = {name: metrics[name] for name in ("loss", "dev/success") if name in metrics}
        self._show_progress(step, displayed, phase_s, num_tokens)

    def log_step(
        self,
        step: int,
        rollout_batch: RolloutBatch,
        batch: TrainBatch,
        stats: UpdateStats,
        extra_metrics: Mapping[str, float],
        sync_metrics: Mapping[str, float],
    ) -> None:
        """Log one RL step; `finish_step` writes and shows it.

        Reward and success are shown before any filter of groups. `extra_metrics` are those of
        advantages and controllers, by their full names.
        """
        self.finish_step()
        trees = rollout_batch.trees
        if self._rollout_writer.should_save(step):
            with self.phase_timer.phase("save_rollouts"):
                self._rollout_writer.save_step(step, trees, batch)
        group_metrics = rollout_batch.metrics()
        mismatch = mismatch_metrics(batch)
        failures = count_failures(rollout_batch.finished_trees)
        metrics: dict[str, float | str] = {
            **rollout_metrics(trees, self.metric_names),
            **group_metrics,
            **_first_failure_metric(failures),
            **mismatch,
            **extra_metrics,
            "actor/loss": stats.loss,
            "actor/grad_norm": stats.grad_norm,
            "actor/lr": stats.learning_rate,
            "actor/num_tokens": stats.num_tokens,
            "actor/num_skipped_steps": stats.num_skipped_steps,
            **{f"actor/{name}": value for name, value in stats.metrics.items()},
            **{f"weight_sync/{name}": value for name, value in sync_metrics.items()},
        }
        for monitor in (self._monitors.gpu, self._monitors.memory, self._monitors.driver):
            if monitor is not None:
                metrics |= monitor.collect()
        reward = group_metrics["rollout/reward_unfiltered"]
        success = group_metrics["rollout/success_unfiltered"]
        self._step_points.append(StepPoint(step=step, reward=reward, success=success))
        if mismatch:
            self._logprob_mismatches.append(mismatch["mismatch/logp_mean_abs"])
        self._entropy_curves += collect_entropy_curves(
            [trajectory for tree in trees for trajectory in tree.trajectories]
        )
        self._last_trees = trees
        self._failures += failures
        displayed = {"reward": reward, "success": success}
        if self._eval_points:
            displayed["held out"] = self._eval_points[-1].reward
        if failures.num_failed:
            displayed["failed"] = failures.failed_fraction
        self._unfinished_step = _UnfinishedStep(
            step=step,
            metrics=metrics,
            batch=batch,
            displayed=displayed,
            warning=failures.describe(),
        )

    def finish_step(self) -> None:
        """Write and show the last RL step, with the seconds of what came after it.

        Does nothing if that has been done.
        """
        unfinished, self._unfinished_step = self._unfinished_step, None
        if unfinished is None:
            return
        phase_s = self.phase_timer.pop_seconds()
        metrics = self._step_metrics(unfinished, phase_s)
        self._write_metrics("rl", unfinished.step, metrics, phase_s)
        self._show_progress(
            unfinished.step,
            unfinished.displayed,
            phase_s,
            int(unfinished.batch.length_B.sum()),
            unique_tokens_per_s=float(metrics["perf/unique_tokens_per_s"]),
            warning=unfinished.warning,
        )

    def _step_metrics(
        self, unfinished: _UnfinishedStep, phase_s: Mapping[str, float]
    ) -> dict[str, float | str]:
        spared = float(unfinished.metrics.get("actor/num_spared_tokens", 0.0))
        throughput = self._throughput.step_metrics(unfinished.batch, phase_s, spared)
        return {**unfinished.metrics, **throughput}

    def save_validation_rollouts(
        self, when: str, suffix: str, trees: Sequence[RolloutTree]
    ) -> None:
        """Save the trees of a validation; `suffix` is the end of its pass's name."""
        self._rollout_writer.save_validation(when, suffix, len(self._step_points), trees)

    def log_validation(self, when: str, result: ValidationResult) -> ValidationResult:
        """Write and print a validation before, during or after RL, and return it."""
        step = len(self._step_points)
        failures = result.sampled.failures
        metrics: dict[str, float | str] = {**result.to_metrics(), **_first_failure_metric(failures)}
        self._write_metrics(f"held_out_{when}", step, metrics, self.phase_timer.pop_seconds())
        if when == "during":
            self._eval_points.append(_eval_point(step, result))
            when = f"at step {step} of"
        scored = f", {_scored_count(failures)}" if failures.num_failed else ""
        self._console.print(
            f"held-out reward {when} RL: {result.sampled.reward:.3f} (success "
            f"{result.sampled.success:.3f}, {result.sampled.num_questions} questions x "
            f"{result.sampled.num_samples} samples{scored})",
            highlight=False,
        )
        if failures.num_failed:
            self._print_failures(f"held out {when} RL", failures)
        return result

    def finish(self, before: ValidationResult | None, after: ValidationResult | None) -> None:
        """Print the final table and rollouts, and write the summary, the curve and the report.

        `after` is `before` itself if there was no RL in between. Either is None if it was not made.
        """
        num_steps = len(self._step_points)
        self._print_rollouts()
        if before is not None and after is not None and after is not before:
            print_eval_comparison(_eval_summary(before), _eval_summary(after), self._console)
        elif (single := after or before) is not None:
            print_evaluation(_eval_summary(single), self._console)
        if self._failures.num_failed:
            self._print_failures("in training", self._failures)
        points = list(self._eval_points)
        if before is not None:
            points.insert(0, _eval_point(0, before))
        if num_steps and after is not None:
            points.append(_eval_point(num_steps, after))
        write_reward_curve(self.run_dir / "reward.png", self._step_points, points)
        summary = {
            "reward_before": before.sampled.reward if before else None,
            "reward_after": after.sampled.reward if after else None,
            "success_before": before.sampled.success if before else None,
            "success_after": after.sampled.success if after else None,
            "num_steps": num_steps,
            "train_seconds": sum(self._stage_s.get(name, 0.0) for name in TRAINING_STAGES),
            "seed": self._config.seed,
            "mismatch_mean_abs": sum(self._logprob_mismatches) / num_steps if num_steps else 0.0,
            "stage_seconds": self._stage_s,
            "entropy_by_offset": self._entropy_curves.to_summary(),
            "held_out": to_builtins(points),
            "before": before.to_metrics() if before else None,
            "after": after.to_metrics() if after else None,
            "failed": {
                "training": _failure_summary(self._failures),
                "before": _failure_summary(before.sampled.failures) if before else None,
                "after": _failure_summary(after.sampled.failures) if after else None,
            },
        }
        atomic_write(self.run_dir / SUMMARY_FILE, json_text(summary, indent=1) + "\n")
        times = ", ".join(
            f"{name} {format_duration(value)}" for name, value in self._stage_s.items()
        )
        self._console.print(f"time: {times}", highlight=False)
        # A URL opens in a browser whatever characters the folder's name has.
        page = write_report(self.run_dir).resolve().as_uri()
        for line in (f"run folder: {self.run_dir}", f"report: {page}"):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_failures(self, where: str, failures: FailureCounts) -> None:
        text = f"{where}: {failures.describe()}"
        self._console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)

    def _print_rollouts(self) -> None:
        trajectories = [t for tree in self._last_trees for t in tree.trajectories]
        texts = [render_trajectory(t) for t in trajectories]
        if texts:
            (self.run_dir / "rollouts.txt").write_text("\n\n".join(texts) + "\n")
        # Spread over the batch, so that they show different questions.
        stride = max(1, len(texts) // max(1, NUM_PRINTED_ROLLOUTS))
        for text in texts[::stride][:NUM_PRINTED_ROLLOUTS]:
            self._console.print(text, markup=False, highlight=False)

    def _write_metrics(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, float | str],
        phase_s: Mapping[str, float],
    ) -> None:
        self._writer.write(stage, step, {**metrics, **_time_metrics(phase_s)})

    def _show_progress(
        self,
        step: int,
        values: Mapping[str, float],
        phase_s: Mapping[str, float],
        num_tokens: int,
        *,
        unique_tokens_per_s: float | None = None,
        warning: str = "",
    ) -> None:
        assert self._progress is not None, "steps are reported inside a stage"
        self._progress.update(
            StepSummary(
                step=step,
                metrics=values,
                phase_s=phase_s,
                tokens_per_s=num_tokens / max(1e-9, sum(phase_s.values())),
                unique_tokens_per_s=unique_tokens_per_s,
                warning=warning,
            )
        )


def _time_metrics(phase_s: Mapping[str, float]) -> dict[str, float]:
    return {f"time/{name}_s": seconds for name, seconds in phase_s.items()}


def _eval_point(step: int, result: ValidationResult) -> EvalPoint:
    return EvalPoint(step=step, reward=result.sampled.reward, success=result.sampled.success)


def _first_failure_metric(failures: FailureCounts) -> dict[str, str]:
    """Return the reason of the first failure as a metric for `metrics.jsonl`; empty without one."""
    return {FIRST_FAILURE_METRIC: failures.first_reason} if failures.num_failed else {}


def _failure_summary(failures: FailureCounts) -> dict[str, float | int | str | None]:
    return {
        "fraction": failures.failed_fraction,
        "num_failed": failures.num_failed,
        "num_trajectories": failures.num_trajectories,
        "first_reason": failures.first_reason or None,
    }


def _scored_count(failures: FailureCounts) -> ScoredCount:
    return ScoredCount(num_scored=failures.num_scored, num_answers=failures.num_trajectories)


def _eval_summary(result: ValidationResult) -> EvalSummary:
    sampled, metrics = result.sampled, result.sampled.metrics
    prefix = "rollout/calls/"
    return EvalSummary(
        reward=sampled.reward,
        reward_se=sampled.reward_se,
        success=sampled.success,
        success_by_source=sampled.success_by_source,
        greedy_success=result.greedy.success if result.greedy else None,
        tool_use_fraction=metrics["rollout/tool_use_fraction"],
        calls_by_tool={
            name.removeprefix(prefix): value
            for name, value in metrics.items()
            if name.startswith(prefix)
        },
        response_tokens_mean=metrics["rollout/response_tokens_mean"],
        num_questions=sampled.num_questions,
        num_answers=sampled.failures.num_trajectories,
        scored=_scored_count(sampled.failures),
        scored_by_source={
            source: _scored_count(counts) for source, counts in sampled.failures_by_source.items()
        },
        first_failure=sampled.failures.first_reason,
        question_means=sampled.question_means,
    )
