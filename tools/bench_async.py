"""Benchmarks asynchronous rollouts against the synchronous loop, with slow tools.

    python tools/bench_async.py [--model FOLDER] [--steps N] [--prompts N] [--staleness K]
        [--slowest SECONDS] [key=value ...]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. Both sides are
complete runs, one after the other, with a real policy, a real engine and real tools, from the same
weights. Tool answers are delayed as in `bench_rollout`: log-normal with median 0.2 s, at most
`--slowest`. Ours has `rollout.max_staleness=K`, the baseline 0; both use
`algo.rollout_correction=token_truncate`. The first and the last step are left out; nothing overlaps
with the last one. The policy is one process and the engine has one worker, so that on two cores
each has its own core, as each has its own GPUs elsewhere; with `parallel.tensor=2` training would
take the engine's core. Cases:

    step/wall         seconds per step
    step/waiting      of these, seconds that the training step waited for rollouts
    step/learning     of these, seconds of everything else
    mismatch/mean     mean |difference| of the policy's and the engine's log-probs in nats
    mismatch/max      the largest difference
    mismatch/ess      effective sample size under the importance weights as a fraction, 1 is all
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
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.bench_rollout import latency_s  # noqa: E402
from tools.measurement import bench_line  # noqa: E402
from tools.preflight_parts.compose import compose_config  # noqa: E402

if TYPE_CHECKING:
    from mega_agentrl.types.protocols import ToolProvider, ToolSession
    from mega_agentrl.types.records import ToolOutcome

line = partial(bench_line, "async")
MEAN_METRICS = {
    "mismatch/mean": ("nats", "mismatch/logp_mean_abs"),
    "mismatch/max": ("nats", "mismatch/logp_max_abs"),
    "mismatch/ess": ("share", "mismatch/ess"),
    "rollout_correction/capped_fraction": ("share", "rollout_correction/capped_fraction"),
    "staleness/mean": ("versions", "rollout/staleness_mean"),
    "staleness/max": ("versions", "rollout/staleness_max"),
}


class DelayedTools:
    """Tools whose answers are delayed."""

    def __init__(self, tools: ToolProvider, slowest_s: float) -> None:
        self._tools = tools
        self._slowest_s = slowest_s

    def open_session(self) -> ToolSession:
        """Open a session whose answers are delayed."""
        return DelayedToolSession(self._tools.open_session(), self._slowest_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tools, name)


class DelayedToolSession:
    """A tool session whose answers are delayed."""

    def __init__(self, session: ToolSession, slowest_s: float) -> None:
        self._session = session
        self._slowest_s = slowest_s

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Execute the call and return its outcome once the simulated latency has passed."""
        begin = time.perf_counter()
        wanted_s = min(self._slowest_s, latency_s(f"{tool} {dict(arguments)}"))
        outcome = await self._session.execute(tool, arguments)
        await asyncio.sleep(begin + wanted_s - time.perf_counter())
        return outcome

    async def fork(self) -> DelayedToolSession:
        """Fork the session; the child delays its answers too."""
        return DelayedToolSession(await self._session.fork(), self._slowest_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def run(given: argparse.Namespace, staleness: int, folder: Path) -> list[dict[str, Any]]:
    """Run the training loop and return the metrics of all steps but the first and the last."""
    from mega_agentrl.runtime.build import build
    from mega_agentrl.runtime.inputs import read_inputs
    from mega_agentrl.train.trainer import train

    config = compose_config(
        [
            "experiment=smoke_ci",
            "parallel.tensor=1",
            f"run_dir={folder}",
            f"model.path={given.model}",
            f"data.train={given.data}/train.parquet",
            f"data.validation={given.data}/validation.parquet",
            f"tool.search.source={given.data}/corpus.jsonl",
            f"data.prompts_per_step={given.prompts}",
            f"total_steps={given.steps}",
            f"rollout.max_staleness={staleness}",
            "algo.rollout_correction=token_truncate",
            "sft.max_steps=0",
            "save_every_steps=0",
            "evaluate.num_questions=4",
            "report.save_trees_every_steps=0",
            "report.trackers=[]",
            *given.overrides,
        ]
    )
    with build(config, read_inputs(config)) as parts:
        train(replace(parts, tools=DelayedTools(parts.tools, given.slowest)), config)
    return read_steps(folder / "metrics.jsonl")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of all RL steps but the first and the last.

    Raises:
        ValueError: the file has fewer than three RL steps.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    if len(steps) < 3:
        raise ValueError(
            f"--steps={len(steps)}: expected at least 3, the first and the last step are left out"
        )
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
    ]
    for case, (unit, name) in MEAN_METRICS.items():
        of = max if case.endswith("/max") else fmean
        lines.append(line(case, unit, *(of(step[name] for step in side) for side in sides)))
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
    parser.add_argument("--slowest", type=float, default=2.0, help="of the answers, in seconds")
    parser.add_argument("overrides", nargs="*", help="key=value, of both sides")
    given = parser.parse_args(arguments)
    if not (given.model / "config.json").is_file():
        print(f"bench_async: no model in {given.model}; `make smoke` leaves one", file=sys.stderr)
        return 2
    given.model, given.data = given.model.resolve(), given.data.resolve()
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name:
        # The runs print what runs print; lines are all that goes to standard output.
        screen, sys.stdout = sys.stdout, sys.stderr
        try:
            sides = [run(given, k, Path(name) / str(k)) for k in (0, given.staleness)]
        finally:
            sys.stdout = screen
    for one in compare(sides[1], sides[0]):
        print(json.dumps(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
