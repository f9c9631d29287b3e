"""Read the result of a run, in whatever state, from its folder.

    summary.json    of a finished run: seconds, fraction of failed trajectories
    sweep_job.json  of a sweep's job: its overrides, and the reason if it failed
    metrics.jsonl   tokens, tool calls and held-out evaluations during training
    config.yaml     the settings

Costs are tokens sampled and tools called in training rollouts. A prefix shared by forks counts for
each of them, because the metrics are means over trajectories. Evaluations are not counted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import EvalCostPoint
from mega_agentrl.report.config_diff import read_config
from mega_agentrl.report.metrics_file import read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mega_agentrl.report.metrics_file import MetricLine, MetricLog

JOB_FILE = "sweep_job.json"
STATE_DONE, STATE_FAILED, STATE_UNFINISHED = "done", "failed", "unfinished"
_RUN_DIR_KEY, _SEED_KEY = "run_dir", "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run."""

    name: str
    """Name of the folder."""
    seed: int
    overrides: tuple[str, ...]
    """Overrides of a sweep's job, else empty."""
    settings: Mapping[str, str]
    """Settings as text by dotted key, without seed and folder."""
    state: str
    """`STATE_DONE`, `STATE_FAILED` or `STATE_UNFINISHED`."""
    failure_reason: str
    """Error message of a failed run."""
    eval_points: tuple[EvalCostPoint, ...]
    """Held-out evaluations in order; the first is before training."""
    num_tokens: int
    """Tokens sampled in training."""
    num_tool_calls: int
    """Tool calls in training."""
    train_s: float
    """Seconds of training."""
    failed_fraction: float = math.nan
    """Trajectories that failed in training, as a fraction of all; nan if it is unknown."""
    held_out_failed_fraction: float = math.nan
    """Fraction of the answers that failed in the evaluations before and after training."""


def read_run_result(folder: Path) -> RunResult:
    """Read the result of the run in a folder.

    Raises:
        ValueError: the folder contains no run, or a file in it cannot be read.
    """
    config = read_config(folder / "config.yaml")
    job = _read_json(folder / JOB_FILE)
    if not config and not job:
        got = f"neither config.yaml nor {JOB_FILE}"
        raise InputError(str(folder), got, "the folder of a run")
    summary = _read_json(folder / "summary.json")
    log = read_metrics(folder / "metrics.jsonl")
    reason = str(job.get("failed") or "")
    steps = log.lines_of_stage("rl")
    overrides = tuple(map(str, job.get("overrides", ())))
    return RunResult(
        name=folder.name,
        seed=_seed(config, overrides),
        overrides=overrides,
        settings={key: str(config[key]) for key in config if key not in (_RUN_DIR_KEY, _SEED_KEY)},
        state=STATE_FAILED if reason else STATE_DONE if summary else STATE_UNFINISHED,
        failure_reason=reason,
        eval_points=tuple(_eval_points(log)),
        num_tokens=sum(map(_num_tokens, steps)),
        num_tool_calls=sum(map(_num_tool_calls, steps)),
        train_s=float(summary.get("train_seconds") or sum(line.duration_s for line in steps)),
        failed_fraction=_failed_fraction(summary, "training"),
        held_out_failed_fraction=_failed_fraction(summary, "before", "after"),
    )


def find_run_dirs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, and the run folders of a sweep by job number.

    Of the folders inside a run only those of a sweep's jobs are runs.

    Raises:
        ValueError: there is no run.
    """
    if _is_run(folder):
        return [folder, *find_job_dirs(folder)]
    run_dirs = [path for path in folder.glob("*/") if _is_run(path)]
    if not run_dirs:
        expected = "the folder of a run or of a sweep"
        raise InputError(str(folder), "no run", expected, "no job of the sweep has started yet")
    return sorted(run_dirs, key=_job_order)


def find_job_dirs(folder: Path) -> list[Path]:
    """Return the folders of a sweep's jobs by their number; empty if there are none."""
    return sorted((path.parent for path in folder.glob(f"*/{JOB_FILE}")), key=_job_order)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / JOB_FILE).is_file()


def _job_order(path: Path) -> tuple[float, str]:
    head = path.name.split("-", 1)[0]
    return (int(head) if head.isdecimal() else math.inf, path.name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(path), error, "JSON") from error
    return value if isinstance(value, dict) else {}


def _failed_fraction(summary: Mapping[str, Any], *stages: str) -> float:
    """Return the share of trajectories that failed in stages of the run; nan if it has none."""
    failed = summary.get("failed")
    counts = [failed.get(stage) for stage in stages] if isinstance(failed, dict) else []
    pairs = [
        (count.get("num_failed", 0), count.get("num_trajectories", 0))
        for count in counts
        if isinstance(count, dict)
    ]
    num_trajectories = sum(number for _, number in pairs)
    return sum(number for number, _ in pairs) / num_trajectories if num_trajectories else math.nan


def _seed(config: Mapping[str, Any], overrides: tuple[str, ...]) -> int:
    """Return the seed of the settings, or of the overrides if the settings were not written."""
    seeds = [item.removeprefix("seed=") for item in overrides if item.startswith("seed=")]
    value = config.get(_SEED_KEY, seeds[-1] if seeds else 0)
    return int(value) if str(value).lstrip("-").isdecimal() else 0


def _eval_points(log: MetricLog) -> Iterator[EvalCostPoint]:
    """Yield the held-out evaluations with sampled answers and the cost of training until then."""
    steps = log.lines_of_stage("rl")
    for line in log.validation_lines():
        if "sampled/reward" not in line.values:
            continue
        earlier_steps = [step for step in steps if step.step <= line.step]
        yield EvalCostPoint(
            num_tokens=sum(map(_num_tokens, earlier_steps)),
            num_tool_calls=sum(map(_num_tool_calls, earlier_steps)),
            reward=line.values["sampled/reward"],
            success=line.values.get("sampled/success", math.nan),
        )


def _num_tokens(line: MetricLine) -> int:
    return _step_total(line, "rollout/sampled_tokens_mean")


def _num_tool_calls(line: MetricLine) -> int:
    return _step_total(line, "rollout/tool_calls_mean")


def _step_total(line: MetricLine, mean_metric: str) -> int:
    """Return the sum over the trajectories of a step, from the metric of their mean."""
    value = line.values.get(mean_metric, 0.0) * line.values.get("rollout/num_trajectories", 0.0)
    return round(value) if math.isfinite(value) else 0
