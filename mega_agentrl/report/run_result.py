"""One run's outcome, from what it left in its folder; whatever state it is in.

    summary.json    the run is finished: held-out reward before and after, seconds
    sweep_job.json  of a sweep's job: its overrides, and why it failed where it did
    metrics.jsonl   tokens, calls and held-out evaluations on the way
    config.yaml     the settings

Tokens are those the policy sampled in training rollouts, calls their tool calls; what a trajectory
shares with the one it forked from counts in both, as the metrics are means over trajectories.
Evaluations cost nothing here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.report.comparison import Mark
from mega_agentrl.report.config_diff import read_config
from mega_agentrl.report.metric_log import read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mega_agentrl.report.metric_log import MetricLine, MetricLog

JOB_FILE = "sweep_job.json"
DONE, FAILED, UNFINISHED = "done", "failed", "unfinished"
_RUN_DIR, _SEED = "run_dir", "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """name: of the folder. overrides: of a sweep's job, else empty. settings: by dotted key, as
    text, seed and folder left out. state: `DONE`, `FAILED` or `UNFINISHED`; reason: of a failure.
    marks: held-out evaluations in order, the first before training. seconds: of training.
    """

    name: str
    seed: int
    overrides: tuple[str, ...]
    settings: Mapping[str, str]
    state: str
    reason: str
    marks: tuple[Mark, ...]
    num_tokens: int
    num_calls: int
    seconds: float


def read_run(folder: Path) -> RunResult:
    """The run in a folder.

    Raises `ValueError` for a folder without a run, and for a file in it that cannot be read.
    """
    config = read_config(folder / "config.yaml")
    job = _read_json(folder / JOB_FILE)
    if not config and not job:
        raise ValueError(
            f"{folder}: got neither config.yaml nor {JOB_FILE} there, expected the folder of a run"
        )
    summary = _read_json(folder / "summary.json")
    log = read_metrics(folder / "metrics.jsonl")
    reason = str(job.get("failed") or "")
    steps = log.of("rl")
    overrides = tuple(map(str, job.get("overrides", ())))
    return RunResult(
        name=folder.name,
        seed=_seed(config, overrides),
        overrides=overrides,
        settings={key: str(config[key]) for key in config if key not in (_RUN_DIR, _SEED)},
        state=FAILED if reason else DONE if summary else UNFINISHED,
        reason=reason,
        marks=tuple(_marks(log)),
        num_tokens=sum(map(_tokens, steps)),
        num_calls=sum(map(_calls, steps)),
        seconds=float(summary.get("train_seconds") or sum(map(_seconds, steps))),
    )


def runs_below(folder: Path) -> list[Path]:
    """The folders of runs in a sweep's folder, by job number; the folder itself where it is one.

    Raises `ValueError` where there is none.
    """
    if _is_run(folder):
        return [folder]
    found = [path for path in folder.glob("*/") if _is_run(path)] if folder.is_dir() else []
    if not found:
        raise ValueError(
            f"{folder}: there is no run in it, expected the folder of a run or of a sweep; "
            "probable cause: no job of the sweep has started yet"
        )
    return sorted(found, key=_number)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / JOB_FILE).is_file()


def _number(path: Path) -> tuple[float, str]:
    head = path.name.split("-", 1)[0]
    return (int(head) if head.isdecimal() else math.inf, path.name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _seed(config: Mapping[str, Any], overrides: tuple[str, ...]) -> int:
    """As the settings say; of a job that failed before it wrote them, as its overrides say."""
    given = [one.removeprefix("seed=") for one in overrides if one.startswith("seed=")]
    value = config.get(_SEED, given[-1] if given else 0)
    return int(value) if str(value).lstrip("-").isdecimal() else 0


def _marks(log: MetricLog) -> Iterator[Mark]:
    """Held-out evaluations with sampled answers, with what training had cost by then."""
    steps = log.of("rl")
    for line in log.held_out():
        if "sampled/reward" not in line.values:
            continue
        before = [one for one in steps if one.step <= line.step]
        yield Mark(
            num_tokens=sum(map(_tokens, before)),
            num_calls=sum(map(_calls, before)),
            reward=line.values["sampled/reward"],
            success=line.values.get("sampled/success", math.nan),
        )


def _tokens(line: MetricLine) -> int:
    return _total(line, "rollout/sampled_tokens")


def _calls(line: MetricLine) -> int:
    return _total(line, "rollout/calls_mean")


def _total(line: MetricLine, mean: str) -> int:
    """A mean over the trajectories of a step, times how many there were."""
    value = line.values.get(mean, 0.0) * line.values.get("rollout/num_trajectories", 0.0)
    return round(value) if math.isfinite(value) else 0


def _seconds(line: MetricLine) -> float:
    return sum(value for name, value in line.values.items() if name.startswith("time/"))
