"""Benchmarks asynchronous rollouts against the synchronous loop, with slow tools.

    python tools/bench_async.py [--quick] [--model FOLDER] [--steps N] [--prompts N] [--staleness K]
        [--slowest SECONDS] [--in-flight] [key=value ...]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. Both sides are
complete runs, one after the other, with a real policy, a real engine and real tools, from the same
weights. Tool answers are delayed (`delayed_tools`) by at most `--slowest` seconds. Ours has
`rollout.max_staleness=K`, the baseline 0; both use `algo.rollout_correction=token_truncate`. With
`--in-flight` both have `rollout.max_staleness=K`, and ours has `weight_sync.in_flight=true`. The
first and the last step are left out, because no rollouts are collected while the last one trains.
The policy is one process and the engine has one worker, so that on a machine with two cores each
has its own; with `parallel.tensor=2` training would take the engine's core. Cases:

    step/wall         seconds per step
    step/waiting      of these, seconds that the training step waited for rollouts
    step/learning     all other seconds of a step
    step/weight_sync  of these, seconds from pausing the engines until they serve new weights
    mismatch/mean     mean |difference| of the policy's and the engine's log-probs in nats
    mismatch/max      the largest difference
    mismatch/ess      effective sample size under the importance weights / number of tokens
    rollout_correction/capped_fraction
                      fraction of tokens whose weight exceeds algo.rollout_correction_cap
    staleness/mean    mean age of the tokens in weight versions
    staleness/max     largest age

With one step of staleness, a step takes the longer of rollout and training instead of their sum, so
the gain is largest when both take equally long: `--prompts` increases training time, `--slowest`
waiting time. The model must call tools: by default the one that `make smoke` leaves in
runs/smoke/model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.errors import InputError  # noqa: E402
from tools.delayed_tools import DelayedTools  # noqa: E402
from tools.measurement import bench_line, parse_options  # noqa: E402
from tools.preflight_parts.compose import compose_config  # noqa: E402

line = partial(bench_line, "async")
METRICS = {
    "mismatch/mean": ("nats", "mismatch/logp_mean_abs"),
    "mismatch/max": ("nats", "mismatch/logp_max_abs"),
    "mismatch/ess": ("share", "mismatch/ess"),
    "rollout_correction/capped_fraction": ("share", "rollout_correction/capped_fraction"),
    "staleness/mean": ("versions", "rollout/staleness_mean"),
    "staleness/max": ("versions", "rollout/staleness_max"),
}


def run(
    args: argparse.Namespace, staleness: int, folder: Path, *, in_flight: bool = False
) -> list[dict[str, Any]]:
    """Run the training loop and return the metrics of all steps but the first and the last."""
    from mega_agentrl.runtime.build import build
    from mega_agentrl.runtime.cluster import ClusterConnection
    from mega_agentrl.runtime.inputs import read_inputs
    from mega_agentrl.train.trainer import train

    config = compose_config(
        [
            "experiment=smoke_ci",
            "parallel.tensor=1",
            f"run_dir={folder}",
            f"model.path={args.model}",
            f"data.train={args.data}/train.parquet",
            f"data.validation={args.data}/validation.parquet",
            f"tool.search.source={args.data}/corpus.jsonl",
            f"data.prompts_per_step={args.prompts}",
            f"total_steps={args.steps}",
            f"rollout.max_staleness={staleness}",
            f"weight_sync.in_flight={in_flight}",
            "algo.rollout_correction=token_truncate",
            "sft.max_steps=0",
            "save_every_steps=0",
            "evaluate.num_questions=4",
            "report.save_trees_every_steps=0",
            "report.trackers=[]",
            *args.overrides,
        ]
    )
    with (
        ClusterConnection(config) as cluster,
        build(config, read_inputs(config), cluster) as components,
    ):
        train(replace(components, tools=DelayedTools(components.tools, args.slowest)), config)
    return read_steps(folder / "metrics.jsonl")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of all RL steps but the first and the last.

    Raises:
        ValueError: the file has fewer than three RL steps.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    if len(steps) < 3:
        expected = "at least 3, as the first and the last step are left out"
        raise InputError("--steps", len(steps), expected)
    return steps[1:-1]


def compare(ours: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the JSON lines of all cases."""

    def wall_s(step: Mapping[str, float]) -> float:
        return sum(value for name, value in step.items() if name.startswith("time/"))

    def waiting_s(step: Mapping[str, float]) -> float:
        return step["time/rollout_s"]

    sides = (ours, baseline)
    lines = [
        line("step/wall", "s", *(fmean(map(wall_s, side)) for side in sides)),
        line("step/waiting", "s", *(fmean(map(waiting_s, side)) for side in sides)),
        line(
            "step/learning",
            "s",
            *(fmean(wall_s(step) - waiting_s(step) for step in side) for side in sides),
        ),
        line(
            "step/weight_sync",
            "s",
            *(fmean(step["time/weight_sync_s"] for step in side) for side in sides),
        ),
    ]
    for case, (unit, name) in METRICS.items():
        reduce = max if case.endswith("/max") else fmean
        # A step in which no group has a signal has no mismatch.
        by_side = [[step[name] for step in side if name in step] for side in sides]
        if all(by_side):
            lines.append(line(case, unit, *map(reduce, by_side)))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides and print one JSON line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smoke/model")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/toolqa")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--slowest", type=float, default=2.0, help="maximum latency of a call in s")
    parser.add_argument("--in-flight", action="store_true", help="compare weight_sync.in_flight")
    parser.add_argument("overrides", nargs="*", help="key=value, of both sides")
    args = parse_options(parser, arguments, steps=3, prompts=4, slowest=0.1)
    if not (args.model / "config.json").is_file():
        print(f"bench_async: no model in {args.model}; `make smoke` leaves one", file=sys.stderr)
        return 2
    args.model, args.data = args.model.resolve(), args.data.resolve()
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name:
        # Standard output is reserved for the result; what the runs print goes to stderr.
        with redirect_stdout(sys.stderr):
            baseline_staleness = args.staleness if args.in_flight else 0
            baseline = run(args, baseline_staleness, Path(name) / "baseline")
            ours = run(args, args.staleness, Path(name) / "ours", in_flight=args.in_flight)
    for result in compare(ours, baseline):
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
