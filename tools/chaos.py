"""Kills the parts of runs at random moments, and compares with a run that nobody disturbed.

    python tools/chaos.py [--kills N] [--runs M] [--seed K] [--out FOLDER] [key=value ...]

N times `kill -9` in M runs: of the driver, a policy rank, an engine, a sandbox host, each as often
as the others. A run must end with the same prompts in the same order and, as they are
`deterministic=true`, with the same losses to 1e-6; nothing of it may be left. Where a sandbox died
in a call, losses are compared before that; of all runs together half must be. First two
undisturbed runs must agree bit for bit; the moments are drawn from all of a step's time in them.
A killed driver is started again by the same command; everything else must mend by itself. Input:
`make model`, or where the overrides say.

Prints a table and leaves it in `chaos.json`; an earlier one's folder is replaced.
Exit codes: 0 all is well, 1 it is not, 2 bad input.
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

from tools.chaos_parts.run import Run, Story, make_plan  # noqa: E402
from tools.chaos_parts.verdict import Outcome, differences, read_outcome  # noqa: E402

NUM_STEPS = 8
DEADLINE_S = 1500.0
SETTINGS = (
    "experiment=smoke_ci",
    f"total_steps={NUM_STEPS}",
    "save_every=3",
    "deterministic=true",
    "report.trees_every=1",
    "report.trackers=[]",
    "tool.python.hosts=1",
    "tool.python.workers=2",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20, help="in all runs together")
    parser.add_argument("--runs", type=int, default=5, help="that are disturbed")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the victims")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "chaos")
    parser.add_argument("overrides", nargs="*", help="key=value, of the runs")
    options = parser.parse_args(arguments)
    if options.runs < 1 or options.kills < options.runs:
        print("error: expected at least one run and a kill for each", file=sys.stderr)
        return 2
    shutil.rmtree(options.out, ignore_errors=True)
    settings = [*SETTINGS, *options.overrides]
    try:
        rows = list(_all_runs(options, settings))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (options.out / "chaos.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else 0


def _all_runs(options: argparse.Namespace, settings: list[str]) -> Sequence[dict[str, Any]]:
    rows = []
    expected: Outcome | None = None
    spans: list[float] = []
    for name in ("undisturbed-1", "undisturbed-2"):
        story = Run((options.out / name).resolve(), settings, []).go(DEADLINE_S)
        found = read_outcome(story.folder)
        wrong = _left(story)
        if expected is not None and found.lines != expected.lines:
            wrong.append("two undisturbed runs differ: the comparison says nothing")
        if not any(found.losses):
            wrong.append("all losses are 0: nothing was learned, and the comparison says nothing")
        expected, spans = expected or found, story.spans()
        rows.append(_tell(name, story, found, wrong))
    assert expected is not None
    draw = random.Random(options.seed)
    share, rest = divmod(options.kills, options.runs)
    num_compared = 0
    for number in range(options.runs):
        plan = make_plan(share + (number < rest), spans, draw)
        story = Run((options.out / f"run-{number}").resolve(), settings, plan).go(DEADLINE_S)
        found = read_outcome(story.folder)
        wrong = differences(expected, found) + _left(story)
        if len(story.dealt) < len(plan):
            wrong.append(f"{len(plan) - len(story.dealt)} blows found no victim")
        if story.num_failures:
            wrong.append(f"the job ended {story.num_failures} times that nobody had killed it")
        num_compared += found.num_compared
        if number + 1 == options.runs and 2 * num_compared < options.runs * len(expected.losses):
            wrong.append(f"{num_compared} losses were compared in all runs, expected half of them")
        rows.append(_tell(f"run-{number}", story, found, wrong))
    return rows


def _left(story: Story) -> list[str]:
    return [f"left behind: {pid} {words}" for pid, words in story.left.items()]


def _tell(name: str, story: Story, found: Outcome, wrong: list[str]) -> dict[str, Any]:
    dealt = [f"{blow.kind} at {at_s:.0f} s (step {blow.step})" for at_s, blow in story.dealt]
    print(f"{name}: {story.seconds:.0f} s, {len(dealt)} kills: {', '.join(dealt) or 'none'}")
    print(f"  losses {', '.join(f'{loss:.6g}' for loss in found.losses)}", flush=True)
    if any(found.num_failed):
        print(f"  {sum(found.num_failed)} trajectories failed: losses are compared before that")
    for line in wrong:
        print(f"  WRONG: {line}")
    return {"name": name, "seconds": story.seconds, "dealt": dealt, "wrong": wrong}


if __name__ == "__main__":
    sys.exit(main())
