"""Kills processes of runs at random moments and compares the results with an undisturbed run.

    python tools/chaos.py [--quick] [--kills N] [--runs M] [--steps S] [--seed K]
        [--out FOLDER] [key=value ...]

Sends N SIGKILLs in M runs to the driver, a policy rank, an engine or a sandbox host, each equally
often. A run must end with the same prompts in the same order and, because it has
`deterministic=true`, with the same losses to 1e-6, and all its processes must end. If a sandbox
died during a call, losses are compared only up to that step; half of all losses must be compared.
First, two undisturbed runs must agree bit for bit; the times of the kills are drawn within the
durations of their steps. A killed driver is restarted with the same command; everything else must
recover by itself. The runs need the files of `make model`, or the files that the overrides name.
`--quick` kills only the driver, in a run of two small steps.

Prints the result of each run and writes all results to `chaos.json`, replacing the folder of an
earlier check. Exit codes: 0 all runs passed, 1 some failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.chaos_parts.outcome import RunOutcome, differences, read_outcome  # noqa: E402
from tools.chaos_parts.run import ChaosRun, RunHistory, plan_kills  # noqa: E402
from tools.measurement import parse_options  # noqa: E402

DEADLINE_S = 1500.0
SETTINGS = (
    "experiment=smoke_ci",
    "save_every_steps=3",
    "deterministic=true",
    "report.save_trees_every_steps=1",
    "report.trackers=[]",
    "tool.python.num_hosts=1",
    "tool.python.num_workers=2",
)
QUICK_SETTINGS = ("save_every_steps=1", "sft.max_steps=20", "evaluate.num_questions=4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20, help="kills in all runs together")
    parser.add_argument("--runs", type=int, default=5, help="number of disturbed runs")
    parser.add_argument("--steps", type=int, default=8, help="RL steps of each run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times and targets")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "chaos")
    parser.add_argument("overrides", nargs="*", help="key=value overrides of the runs")
    args = parse_options(parser, arguments, kills=1, runs=1, steps=2)
    if args.runs < 1 or args.kills < args.runs:
        print("error: expected at least one run and a kill for each", file=sys.stderr)
        return 2
    shutil.rmtree(args.out, ignore_errors=True)
    settings = [*SETTINGS, f"total_steps={args.steps}"]
    settings += [*(QUICK_SETTINGS if args.quick else ()), *args.overrides]
    try:
        rows = list(_run_all(args, settings))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (args.out / "chaos.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else 0


def _run_all(args: argparse.Namespace, settings: list[str]) -> Sequence[dict[str, Any]]:
    rows = []
    expected: RunOutcome | None = None
    durations_s: list[float] = []
    for name in ("undisturbed-1", "undisturbed-2"):
        history = ChaosRun((args.out / name).resolve(), settings, []).run(DEADLINE_S)
        outcome = read_outcome(history.folder)
        problems = _leftover_processes(history)
        if expected is not None and outcome.lines != expected.lines:
            problems.append("two undisturbed runs differ: the comparison is meaningless")
        if not any(outcome.losses):
            problems.append("all losses are 0: the policy learns nothing, nothing can be compared")
        expected, durations_s = expected or outcome, history.step_durations_s()
        rows.append(_print_result(name, history, outcome, problems))
    assert expected is not None
    rng = random.Random(args.seed)
    kills_per_run, remainder = divmod(args.kills, args.runs)
    num_compared = 0
    for number in range(args.runs):
        plan = plan_kills(kills_per_run + (number < remainder), durations_s, rng)
        history = ChaosRun((args.out / f"run-{number}").resolve(), settings, plan).run(DEADLINE_S)
        outcome = read_outcome(history.folder)
        problems = differences(expected, outcome) + _leftover_processes(history)
        if len(history.executed_kills) < len(plan):
            problems.append(f"{len(plan) - len(history.executed_kills)} kills found no target")
        if history.num_failures:
            problems.append(f"the driver ended {history.num_failures} times without being killed")
        num_compared += outcome.num_compared
        if number + 1 == args.runs and 2 * num_compared < args.runs * len(expected.losses):
            problems.append(f"{num_compared} losses of all runs were compared, expected half")
        rows.append(_print_result(f"run-{number}", history, outcome, problems))
    return rows


def _leftover_processes(history: RunHistory) -> list[str]:
    return [f"still running: {pid} {words}" for pid, words in history.leftover_processes.items()]


def _print_result(
    name: str, history: RunHistory, outcome: RunOutcome, problems: list[str]
) -> dict[str, Any]:
    kills = [
        f"{kill.kind} at {at_s:.0f} s (step {kill.step})" for at_s, kill in history.executed_kills
    ]
    print(f"{name}: {history.duration_s:.0f} s, {len(kills)} kills: {', '.join(kills) or 'none'}")
    print(f"  losses {', '.join(f'{loss:.6g}' for loss in outcome.losses)}", flush=True)
    if any(outcome.num_failed):
        print(f"  {sum(outcome.num_failed)} trajectories failed: losses are compared up to there")
    for line in problems:
        print(f"  WRONG: {line}")
    return {"name": name, "seconds": history.duration_s, "kills": kills, "wrong": problems}


if __name__ == "__main__":
    sys.exit(main())
