"""Read the result of a run, in whatever state, from its folder.

    summary.json    of a finished run: seconds, fraction of failed trajectories
    sweep_job.json  of a sweep's job: its overrides, and the reason if it failed
    metrics.jsonl   tokens, tool calls and held-out evaluations during training
    config.yaml     the settings

Costs are tokens sampled and tools called in training rollouts. A prefix shared by forks counts for
each of them, because the metrics are means over trajectories. Evaluations are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mega_agentrl.config.input_files import parse_json, reading
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


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailureCount:
    """Trajectories of a stage in `summary.json`."""

    num_failed: Count = 0
    num_trajectories: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """The part of `summary.json` that is compared."""

    train_seconds: float | None = None
    failed: dict[str, _FailureCount | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """`sweep_job.json`."""

    failed: str | None = None
    overrides: list[str] = field(default_factory=list)


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
    job = _read_record(folder / JOB_FILE, _Job)
    if not config and job is None:
        got = f"neither config.yaml nor {JOB_FILE}"
        raise InputError(str(folder), got, "the folder of a run")
    job = job or _Job()
    summary = _read_record(folder / "summary.json", _Summary)
    log = read_metrics(folder / "metrics.jsonl")
    reason = job.failed or ""
    steps = log.lines_of_stage("rl")
    overrides = tuple(map(str, job.overrides))
    return RunResult(
        name=folder.name,
        seed=_seed(config, overrides),
        overrides=overrides,
        settings={key: str(config[key]) for key in config if key not in (_RUN_DIR_KEY, _SEED_KEY)},
        state=STATE_FAILED if reason else STATE_DONE if summary is not None else STATE_UNFINISHED,
        failure_reason=reason,
        eval_points=tuple(_eval_points(log)),
        num_tokens=sum(map(_num_tokens, steps)),
        num_tool_calls=sum(map(_num_tool_calls, steps)),
        train_s=(summary and summary.train_seconds) or sum(line.duration_s for line in steps),
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


def _read_record[RecordT](path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return the part of a JSON file that `kind` describes; None without a file.

    Raises:
        ValueError: The file has other values.
    """
    if not path.is_file():
        return None
    with reading(str(path), path, "JSON of a run"):
        return msgspec.convert(parse_json(path.read_bytes()), kind)


def _failed_fraction(summary: _Summary | None, *stages: str) -> float:
    """Return the share of trajectories that failed in stages of the run; nan if it has none."""
    failed = (summary and summary.failed) or {}
    counts = [count for stage in stages if (count := failed.get(stage)) is not None]
    num_trajectories = sum(count.num_trajectories for count in counts)
    if not num_trajectories:
        return math.nan
    return sum(count.num_failed for count in counts) / num_trajectories


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
