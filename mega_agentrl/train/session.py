"""What a run leaves behind and shows: metrics, progress, tables, curve, summary.

Takes records from the loop and hands them to `report/` and `metrics`; computes nothing the
loop depends on. Files in the run folder: `metrics.jsonl`, `summary.json`, `reward.png`,
`rollouts.txt`, `rollouts/`, `report.html` (of a run that ends before its end: `last_page`). The
trackers are `Watch`'s, and closed by others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mega_agentrl.batch.balance import token_imbalance
from mega_agentrl.batch.minibatch import step_lengths
from mega_agentrl.report.curve import CurvePoint, HeldOutPoint, write_curve
from mega_agentrl.report.progress import StageProgress, StepView, duration
from mega_agentrl.report.table import EvalView, print_comparison, print_evaluation
from mega_agentrl.rollout.entropy_metrics import EntropyCurve, entropy_curve
from mega_agentrl.rollout.metrics import rollout_metrics
from mega_agentrl.rollout.render import render
from mega_agentrl.train.advantages import mismatch_metrics
from mega_agentrl.train.metrics import MetricWriter, PhaseClock
from mega_agentrl.train.rollout_files import RolloutFiles
from mega_agentrl.train.run_folder import SUMMARY, write_whole
from mega_agentrl.train.run_report import write_report
from mega_agentrl.train.throughput import Throughput
from mega_agentrl.types.watch import Watch

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.train.evaluate import HeldOut
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.records import RolloutTree


NUM_PRINTED = 3
"""Rollouts printed at the end."""

TRAINING_STAGES = ("warm start", "RL")
"""Stages whose seconds add up to `train_seconds` of the summary."""


class Session:
    """The recorder of one run; a context manager."""

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        console: Console | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.clock = PhaseClock()
        self._config = config
        self._console = console or Console()
        self._watch = watch or Watch()
        self._writer = MetricWriter(run_dir, self._watch.trackers)
        self._throughput = Throughput(config, self._watch.gpu_name)
        self._progress: StageProgress | None = None
        self._curve: list[CurvePoint] = []
        self._held_out: list[HeldOutPoint] = []
        self._mismatch: list[float] = []
        self._files = RolloutFiles(run_dir, config)
        self._entropy = EntropyCurve()
        self._last_trees: Sequence[RolloutTree] = ()
        self._stage_s: dict[str, float] = {}
        self._running: tuple[str, float] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def state(self) -> dict[str, Any]:
        """What the closing summary needs of the steps so far, as plain values."""
        stage_s = dict(self._stage_s)
        if self._running is not None:
            title, start_s = self._running
            stage_s[title] = stage_s.get(title, 0.0) + time.perf_counter() - start_s
        return {
            "curve": [asdict(point) for point in self._curve],
            "held_out": [asdict(point) for point in self._held_out],
            "mismatch": list(self._mismatch),
            "entropy": self._entropy.to_plain(),
            "stage_seconds": stage_s,
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; raises `ValueError` for anything else."""
        try:
            self._curve = [CurvePoint(**point) for point in state["curve"]]
            self._held_out = [HeldOutPoint(**point) for point in state["held_out"]]
            self._mismatch = [float(value) for value in state["mismatch"]]
            self._entropy = EntropyCurve.from_plain(state["entropy"])
            self._stage_s = dict(state["stage_seconds"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"session state: cannot be read ({error!r}); probable cause: a checkpoint of "
                "another version"
            ) from error

    def started(self, seconds: float) -> None:
        """Note how long the start took."""
        self._stage_s["start"] = self._stage_s.get("start", 0.0) + seconds
        self.note(f"start of policy, engines and tools took {duration(seconds)}")

    @contextmanager
    def stage(self, title: str, num_steps: int, *, num_done: int = 0) -> Iterator[None]:
        """Show and time a stage of the run. num_done: steps made before this start."""
        start_s = time.perf_counter()
        self._running = (title, start_s)
        progress = StageProgress(title, num_steps, console=self._console, num_done=num_done)
        try:
            with progress as self._progress:
                yield
        finally:
            self._running = None
            before_s = self._stage_s.get(title, 0.0)
            self._stage_s[title] = before_s + time.perf_counter() - start_s
        self.clock.take()

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False)

    def show_pass(self, num_done: int, num_chunks: int) -> None:
        """Show how far a pass over the data is, inside of its stage."""
        self._show(num_done, {"done": num_done / num_chunks}, self.clock.take(), 0)

    def report_sft(self, step: int, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """Write and show one supervised step."""
        phase_s = self.clock.take()
        self._write("sft", step, metrics, phase_s)
        shown = {name: metrics[name] for name in ("loss", "dev/success") if name in metrics}
        self._show(step, shown, phase_s, num_tokens)

    def report_step(
        self,
        step: int,
        collected: Collected,
        batch: TrainBatch,
        stats: UpdateStats,
        figures: Mapping[str, float],
        sent: Mapping[str, float],
    ) -> None:
        """Write and show one RL step; the curve shows the policy before any filter of groups.

        figures: of advantages and controllers, by their metric names.
        """
        trees = collected.trees
        if self._files.chosen(step):
            with self.clock.phase("keep"):
                self._files.keep_step(step, trees, batch)
        phase_s = self.clock.take()
        groups = collected.metrics()
        mismatch = mismatch_metrics(batch)
        metrics: dict[str, float | str] = {
            **rollout_metrics(trees),
            **groups,
            **mismatch,
            **figures,
            "update/loss": stats.loss,
            "update/grad_norm": stats.grad_norm,
            "update/learning_rate": stats.learning_rate,
            "update/num_tokens": stats.num_tokens,
            "update/num_skipped": stats.num_skipped,
            "batch/token_imbalance": token_imbalance(
                step_lengths(batch, self._config.optim.num_minibatches),
                self._config.parallel.data,
            ),
            **{f"update/{name}": value for name, value in stats.metrics.items()},
            **{f"send/{name}": value for name, value in sent.items()},
        }
        num_tokens = int(batch.length_B.sum())
        metrics |= self._throughput.of(batch, phase_s)
        if self._watch.gpus is not None:
            metrics |= self._watch.gpus.take()
        if self._watch.memory is not None:
            metrics |= self._watch.memory.take()
        self._write("rl", step, metrics, phase_s)
        reward, success = groups["rollout/reward_seen"], groups["rollout/success_seen"]
        self._curve.append(CurvePoint(step=step, reward=reward, success=success))
        self._mismatch.append(mismatch["mismatch/logp_mean_abs"])
        self._entropy += entropy_curve([one for tree in trees for one in tree.trajectories])
        self._last_trees = trees
        shown = {"reward": reward, "success": success}
        if self._held_out:
            shown["held out"] = self._held_out[-1].reward
        self._show(step, shown, phase_s, num_tokens)

    def keep_held_out(self, when: str, end: str, trees: Sequence[RolloutTree]) -> None:
        """Keep the trees of a held-out evaluation; end: of the name of the pass."""
        self._files.keep_held_out(when, end, len(self._curve), trees)

    def show_held_out(self, when: str, held_out: HeldOut) -> HeldOut:
        """Write and print a held-out evaluation before, during or after RL; returns it."""
        step = len(self._curve)
        self._write(f"held_out_{when}", step, held_out.as_metrics(), self.clock.take())
        if when == "during":
            self._held_out.append(_held_out_point(step, held_out))
            when = f"at step {step} of"
        self._console.print(
            f"held-out reward {when} RL: {held_out.sampled.reward:.3f} "
            f"(success {held_out.sampled.success:.3f}, "
            f"{held_out.sampled.num_questions} questions x {held_out.sampled.num_samples} samples)",
            highlight=False,
        )
        return held_out

    def finish(self, before: HeldOut, after: HeldOut) -> None:
        """Print the closing table and rollouts, write the summary and the curve.

        after: `before` itself where there was no RL between them.
        """
        last = len(self._curve)
        self._print_rollouts()
        if after is before:
            print_evaluation(_view(before), self._console)
        else:
            print_comparison(_view(before), _view(after), self._console)
        points = [_held_out_point(0, before), *self._held_out]
        if last:
            points.append(_held_out_point(last, after))
        write_curve(self.run_dir / "reward.png", self._curve, points)
        summary = {
            "reward_before": before.sampled.reward,
            "reward_after": after.sampled.reward,
            "success_before": before.sampled.success,
            "success_after": after.sampled.success,
            "num_steps": last,
            "train_seconds": sum(self._stage_s.get(name, 0.0) for name in TRAINING_STAGES),
            "seed": self._config.seed,
            "mismatch_mean_abs": sum(self._mismatch) / last if last else 0.0,
            "stage_seconds": self._stage_s,
            "entropy_by_offset": self._entropy.as_record(),
            "held_out": [asdict(point) for point in points],
            "before": before.as_metrics(),
            "after": after.as_metrics(),
        }
        write_whole(self.run_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
        times = ", ".join(f"{name} {duration(value)}" for name, value in self._stage_s.items())
        self._console.print(f"time: {times}", highlight=False)
        self._console.print(f"run folder: {self.run_dir}", highlight=False, soft_wrap=True)
        page = write_report(self.run_dir)
        self._console.print(f"report: {page}", highlight=False, soft_wrap=True)

    def _print_rollouts(self) -> None:
        trajectories = [t for tree in self._last_trees for t in tree.trajectories]
        texts = [render(t) for t in trajectories]
        if texts:
            (self.run_dir / "rollouts.txt").write_text("\n\n".join(texts) + "\n")
        # Spread over the batch, so that they show different questions.
        stride = max(1, len(texts) // max(1, NUM_PRINTED))
        for text in texts[::stride][:NUM_PRINTED]:
            self._console.print(text, markup=False, highlight=False)

    def _write(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, float | str],
        phase_s: Mapping[str, float],
    ) -> None:
        times = {f"time/{name}_s": seconds for name, seconds in phase_s.items()}
        self._writer.write(stage, step, {**metrics, **times})

    def _show(
        self, step: int, values: Mapping[str, float], phase_s: Mapping[str, float], num_tokens: int
    ) -> None:
        assert self._progress is not None, "steps are reported inside a stage"
        self._progress.show(
            StepView(
                step=step,
                values=values,
                phase_s=phase_s,
                tokens_per_s=num_tokens / max(1e-9, sum(phase_s.values())),
            )
        )


def _held_out_point(step: int, held_out: HeldOut) -> HeldOutPoint:
    return HeldOutPoint(step=step, reward=held_out.sampled.reward, success=held_out.sampled.success)


def _view(held_out: HeldOut) -> EvalView:
    sampled, metrics = held_out.sampled, held_out.sampled.metrics
    prefix = "rollout/calls/"
    return EvalView(
        reward=sampled.reward,
        reward_se=sampled.reward_se,
        success=sampled.success,
        success_by_source=sampled.success_by_source,
        greedy_success=held_out.greedy.success if held_out.greedy else None,
        tool_use=metrics["rollout/tool_use"],
        calls_by_tool={
            name.removeprefix(prefix): value
            for name, value in metrics.items()
            if name.startswith(prefix)
        },
        response_tokens=metrics["rollout/response_tokens"],
        num_questions=sampled.num_questions,
        num_answers=sampled.num_questions * sampled.num_samples,
    )
