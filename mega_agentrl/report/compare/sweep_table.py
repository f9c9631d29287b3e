"""Compare runs in a table, as Markdown and JSON, and in a plot.

Runs that differ only in their seed are one row: means over the finished runs, and the sample
standard deviations of reward and success for two or more. A row is named by the overrides (or
settings, for runs outside of a sweep) that differ from the other rows. Failed and unfinished runs
are not part of the means and are listed with the reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mega_agentrl.report.compare.algorithms import (
    MISSING_CELL,
    RunCostCurve,
    markdown_row,
    sample_std,
    write_cost_plot,
)
from mega_agentrl.report.compare.run_result import STATE_DONE
from mega_agentrl.report.page.html import replace_non_finite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.report.compare.run_result import RunResult

MAX_SETTINGS_IN_NAME = 4
"""Maximum number of settings in the name of a row without overrides."""

_SWEEP_HEADINGS = (
    "settings", "runs", "reward before", "reward after", "success before", "success after",
    "failed in training", "failed held out", "tokens", "tool calls", "minutes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Means over the finished runs of a group; nan without a finished run."""

    name: str
    """Name of the group."""
    num_runs: int
    """Number of runs, including unfinished ones."""
    num_finished_runs: int
    reward_before: float
    """Held-out reward before training."""
    reward_before_std: float | None
    """Sample standard deviation over runs; None for fewer than two."""
    reward_after: float
    """Held-out reward after training."""
    reward_after_std: float | None
    """Sample standard deviation over runs; None for fewer than two."""
    success_before: float
    """Held-out success before training."""
    success_before_std: float | None
    """Sample standard deviation over runs; None for fewer than two."""
    success_after: float
    """Held-out success after training."""
    success_after_std: float | None
    """Sample standard deviation over runs; None for fewer than two."""
    failed_fraction: float
    """Trajectories that failed in training, as a fraction of all."""
    held_out_failed_fraction: float
    """Fraction of the answers that failed in the evaluations before and after training."""
    num_tokens: float
    """Tokens sampled in training."""
    num_tool_calls: float
    """Tool calls in training."""
    minutes: float
    """Minutes of training."""


def build_sweep_rows(runs: Sequence[RunResult]) -> list[SweepRow]:
    """Return a row for each group of runs, in the order of their first runs."""
    return [_build_row(name, group) for name, group in group_runs_by_settings(runs).items()]


def group_runs_by_settings(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group runs that differ only in their seed, by the name of the group."""
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    for run in runs:
        groups.setdefault(_settings_key(run), []).append(run)
    shared = set.intersection(*(set(key) for key in groups)) if len(groups) > 1 else set()
    groups_by_name: dict[str, list[RunResult]] = {}
    for key, group in groups.items():
        differing = [setting for setting in key if setting not in shared]
        if not group[0].overrides and len(differing) > MAX_SETTINGS_IN_NAME:
            differing = [*differing[:MAX_SETTINGS_IN_NAME], "..."]
        name = ", ".join(differing) if len(groups) > 1 and differing else group[0].name
        # Names may be equal if one group lacks a setting of another.
        name = f"{name} ({group[0].name})" if name in groups_by_name else name
        groups_by_name[name] = group
    return groups_by_name


def sweep_markdown(runs: Sequence[RunResult]) -> str:
    """Format the table, followed by the runs that are not in its means."""
    lines = [
        markdown_row(_SWEEP_HEADINGS),
        markdown_row(["---"] * len(_SWEEP_HEADINGS)),
    ]
    lines += [markdown_row(_sweep_cells(row)) for row in build_sweep_rows(runs)]
    excluded = [run for run in runs if run.state != STATE_DONE]
    if excluded:
        lines.append("")
    for run in excluded:
        reason = (
            run.failure_reason.splitlines()[0]
            if run.failure_reason
            else "it was killed, or is still running"
        )
        lines.append(f"* {run.name}: {run.state}: {reason}")
    return "\n".join(lines) + "\n"


def sweep_json(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return rows and runs as plain values; nan is null."""
    plain = {
        "rows": [asdict(row) for row in build_sweep_rows(runs)],
        "runs": [
            {key: value for key, value in asdict(run).items() if key != "settings"} for run in runs
        ],
    }
    cleaned: dict[str, Any] = replace_non_finite(plain, lambda value: None)
    return cleaned


def write_sweep_report(out: Path, runs: Sequence[RunResult]) -> str:
    """Write comparison.md, comparison.json and comparison.png into `out`; return the table.

    The plot shows the evaluation points of the finished runs; without any it is not written.
    """
    text = sweep_markdown(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.md").write_text(text, encoding="utf-8")
    (out / "comparison.json").write_text(json.dumps(sweep_json(runs), indent=1) + "\n")
    if curves := finished_run_curves(runs):
        write_cost_plot(out / "comparison.png", curves, baseline="", title=out.resolve().name)
    return text


def finished_run_curves(runs: Sequence[RunResult]) -> list[RunCostCurve]:
    """Return the curves of the finished runs.

    If the runs of a group have different numbers of evaluations, only the first and the last are
    used.
    """
    curves = []
    for name, group in group_runs_by_settings(runs).items():
        finished_runs = [run for run in group if run.state == STATE_DONE and run.eval_points]
        is_same_number = len({len(run.eval_points) for run in finished_runs}) == 1
        for run in finished_runs:
            points = run.eval_points
            if not is_same_number:
                points = (points[0], points[-1])
            curves.append(RunCostCurve(algorithm=name, seed=run.seed, eval_points=points))
    return curves


def _settings_key(run: RunResult) -> tuple[str, ...]:
    """Return the settings by which runs are grouped."""
    if run.overrides:
        return tuple(
            item
            for item in run.overrides
            if item.lstrip("+").split("=")[0] not in ("seed", "run_dir")
        )
    return tuple(f"{key}={value}" for key, value in run.settings.items())


def _build_row(name: str, group: Sequence[RunResult]) -> SweepRow:
    finished_runs = [run for run in group if run.state == STATE_DONE]
    evaluated_runs = [run for run in finished_runs if run.eval_points]
    # Without `evaluate.before_training` the first evaluation comes after some training.
    before = [run.eval_points[0] for run in evaluated_runs if not run.eval_points[0].num_tokens]
    after = [run.eval_points[-1] for run in evaluated_runs]
    return SweepRow(
        name=name,
        num_runs=len(group),
        num_finished_runs=len(finished_runs),
        reward_before=_mean([point.reward for point in before]),
        reward_before_std=sample_std([point.reward for point in before]),
        reward_after=_mean([point.reward for point in after]),
        reward_after_std=sample_std([point.reward for point in after]),
        success_before=_mean([point.success for point in before]),
        success_before_std=_finite_std([point.success for point in before]),
        success_after=_mean([point.success for point in after]),
        success_after_std=_finite_std([point.success for point in after]),
        failed_fraction=_mean([run.failed_fraction for run in finished_runs]),
        held_out_failed_fraction=_mean([run.held_out_failed_fraction for run in finished_runs]),
        num_tokens=_mean([run.num_tokens for run in finished_runs]),
        num_tool_calls=_mean([run.num_tool_calls for run in finished_runs]),
        minutes=_mean([run.train_s / 60 for run in finished_runs]),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _finite_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation without the missing values (nan)."""
    return sample_std([value for value in values if math.isfinite(value)])


def _sweep_cells(row: SweepRow) -> list[str]:
    count = str(row.num_runs)
    if row.num_finished_runs < row.num_runs:
        count = f"{row.num_finished_runs} of {row.num_runs}"
    return [
        row.name.replace("|", "\\|"),
        count,
        _format_with_std(row.reward_before, row.reward_before_std),
        _format_with_std(row.reward_after, row.reward_after_std),
        _format_with_std(row.success_before, row.success_before_std),
        _format_with_std(row.success_after, row.success_after_std),
        _format_or_missing(row.failed_fraction, ".1%"),
        _format_or_missing(row.held_out_failed_fraction, ".1%"),
        _format_or_missing(row.num_tokens, ",.0f"),
        _format_or_missing(row.num_tool_calls, ",.0f"),
        _format_or_missing(row.minutes, ".1f"),
    ]


def _format_with_std(value: float, spread: float | None) -> str:
    return _format_or_missing(value, ".3f") + ("" if spread is None else f" ± {spread:.3f}")


def _format_or_missing(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else MISSING_CELL
