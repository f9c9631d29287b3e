"""The scoreboard: trains all algorithms on up to three tasks, with equal budgets of tokens.

    python tools/compare_algos.py [--tasks NAME,...] [--algos NAME,...] [--seeds K,...]
                                  [--rates LR,...] [--tuning-seed K] [--tokens N | --steps N]
                                  [--marks N] [--save-every N] [--out FOLDER] [--page FILE]
                                  [--results FILE] [--list] [--quick] [key=value ...]

All runs of a task start from the same warm-started checkpoint. Each algorithm first gets one run
for each learning rate, with a seed that is not scored, and then runs all seeds with the rate that
was best on the development questions; `--rates 2e-4` skips that. Each run trains until it has
generated `--tokens` tokens; the shared prefix of forks counts once, since it is generated once. The
held-out reward is evaluated at `--marks` equal fractions of the budget, on the same questions with
the same seeds. An algorithm is a preset of `algo=`, to which `+` adds overrides:
`arpo+algo.egpo.lam=0.4`. `--list` says what would run, and what is skipped and why; `--quick` runs
two algorithms on one task for a minute, which shows only that everything works.

After each scored run it writes `scoreboard.md`, `scoreboard.svg` and `scoreboard.json`, and for
each task `comparison.md` and `comparison.png`, to the folder; page and figure also to `--page`. It
can be interrupted at any time: the same command continues, and finished runs are not repeated. The
folders are described in `compare/run.py`. With `--results` each finished run is also a line of that
file, and runs that it has are not repeated where the folders are missing
(`compare/result_file.py`). Input: `tools/make_tiny_model.py`, which `--list` names.

Exit codes: 0 done, 2 bad input, 1 a failure, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.report.compare.algorithms import (  # noqa: E402
    algorithms_markdown,
    summarize_algorithms,
    write_cost_plot,
)
from mega_agentrl.report.compare.scoreboard import (  # noqa: E402
    score_rows,
    scoreboard_markdown,
    write_scoreboard_figure,
)
from tools.compare.budget import Budget  # noqa: E402
from tools.compare.plan import (  # noqa: E402
    BASELINE,
    TASKS,
    CompareOptions,
    check_overrides,
    list_presets,
)
from tools.compare.task_runner import TaskRunner  # noqa: E402
from tools.measurement import add_quick_option  # noqa: E402

BUDGET_TOKENS = 100_000
NUM_EVALUATIONS = 2
SEEDS, TUNING_SEED, LEARNING_RATES = "1,2,3,4,5", 101, "1e-4,3e-4"
QUICK_OPTIONS = {
    "tasks": "toolqa",
    "algos": "grpo,arpo",
    "seeds": "1",
    "rates": "2e-4",
    "tokens": 100,
    "marks": 1,
    "out": Path("runs/compare_quick"),
}
QUICK_OVERRIDES = (
    "sft.max_steps=2",
    "data.prompts_per_step=2",
    "evaluate.num_questions=4",
    "evaluate.num_samples=1",
)
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and return the exit code."""
    args = _parse(arguments)
    command = f"tools/compare_algos.py {shlex.join(arguments)}".strip()
    try:
        check_overrides(args.overrides)
        options = _make_options(args)
        runners = [TaskRunner.plan(TASKS[key], options, args.algos) for key in args.tasks]
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"compare_algos: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.list:
        print("\n".join(line for runner in runners for line in _describe(runner)))
        return 0
    _log_to_file(options.out)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _compare(runners, lambda: _write_all(options, runners, command, args.page))
    except KeyboardInterrupt:
        print("compare_algos: interrupted; the same command continues from here", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        logging.exception("the comparison failed")
        messages = options.out / "logs"
        print(f"compare_algos: {error}\nmessages: {messages}", file=sys.stderr)
        return FAILED
    return 0


def _compare(runners: Sequence[TaskRunner], write: Callable[[], str]) -> None:
    for runner in runners:
        runner.read_finished()
        runner.on_result = write
    for runner in runners:
        runner.run_missing()
    print(write())


def _write_all(
    options: CompareOptions, runners: Sequence[TaskRunner], command: str, page: Path | None
) -> str:
    """Write page, figure, numbers and the tables of the tasks; return the page."""
    tasks = [runner.scores() for runner in runners]
    text = scoreboard_markdown(
        tasks,
        baseline=BASELINE,
        introduction=_introduction(options, command),
        figure="scoreboard.svg",
    )
    for path in (options.out / "scoreboard.md", *([page] if page else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        write_scoreboard_figure(path.with_name("scoreboard.svg"), tasks, baseline=BASELINE)
    numbers = {}
    for runner, task in zip(runners, tasks, strict=True):
        rows = [asdict(row) for row in score_rows(task, baseline=BASELINE)]
        numbers[runner.task.key] = {"rows": rows, "runs": [asdict(run) for run in task.curves]}
        if task.curves:
            folder = options.out / runner.task.key
            folder.mkdir(parents=True, exist_ok=True)
            costs = summarize_algorithms(task.curves, baseline=BASELINE)
            table = algorithms_markdown(costs, baseline=BASELINE)
            (folder / "comparison.md").write_text(table, encoding="utf-8")
            write_cost_plot(folder / "comparison.png", task.curves, baseline=BASELINE)
    (options.out / "scoreboard.json").write_text(json.dumps(numbers, indent=1) + "\n")
    return text


def _introduction(options: CompareOptions, command: str) -> str:
    tuning = (
        f"each algorithm has the best of {len(options.learning_rates)} learning rates, chosen with "
        f"seed {options.tuning_seed} on other questions, and then seeds "
        if len(options.learning_rates) > 1
        else "each algorithm has the same learning rate, and seeds "
    )
    return (
        f"{datetime.now(tz=UTC):%Y-%m-%d}, commit {_commits_of_results(options)}:\n\n"
        f"    {command}\n\n"
        "All runs of a task start from one warm-started checkpoint and train for "
        f"{options.budget}; {tuning}{', '.join(map(str, options.seeds))}. Intervals are 95 % "
        "percentile bootstrap intervals over the seeds; they do not cover another warm start. A "
        "difference to "
        f"`{BASELINE}`, taken seed by seed, counts only if its interval excludes 0. "
        "In the figure green is better and red is worse; the vertical lines are the reward before "
        f"training (dashed) and `{BASELINE}`'s (dotted)."
    )


def _commits_of_results(options: CompareOptions) -> str:
    """Return the commits that made the results, as the page shows them."""
    if options.results is None:
        return options.commit
    from tools.compare.result_file import ResultFile

    return ", ".join(ResultFile(options.results).commits) or options.commit


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Return the files outside of `--out` that the comparison writes."""
    page = [args.page, args.page.with_name("scoreboard.svg")] if args.page else []
    return [*([args.results] if args.results else []), *page]


def _commit(outputs: Sequence[Path]) -> str:
    """Return the commit of this code, with `-dirty` if files other than `outputs` have changed."""
    inside = [path.resolve() for path in outputs if path.resolve().is_relative_to(ROOT)]
    paths = ["--", ".", *(f":(exclude){path}" for path in inside)]
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        has_changes = _git("status", "--porcelain", "--untracked-files=no", *paths)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if has_changes else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _describe(runner: TaskRunner) -> list[str]:
    """Return lines that say what would run on a task."""
    options, task = runner.options, runner.task
    num_tuning = len(options.learning_rates) if len(options.learning_rates) > 1 else 0
    num_runs = len(runner.algorithms) * (num_tuning + len(options.seeds))
    return [
        f"{task.key}: {num_runs} runs of {options.budget}; experiment={task.experiment}, input: "
        f"tools/make_tiny_model.py {task.generated}",
        f"  algorithms: {', '.join(runner.algorithms)}",
        *(f"  skipped: {name}: {reason}" for name, reason in runner.skipped.items()),
    ]


def _make_options(args: argparse.Namespace) -> CompareOptions:
    return CompareOptions(
        out=args.out.resolve(),
        seeds=tuple(args.seeds),
        learning_rates=tuple(args.rates),
        tuning_seed=args.tuning_seed,
        budget=Budget(num_tokens=args.tokens, num_steps=args.steps, num_evaluations=args.marks),
        save_every=args.save_every,
        results=args.results,
        commit=_commit(_outputs(args)),
        overrides=tuple(args.overrides),
    )


def _log_to_file(out: Path) -> None:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=out / "logs" / "driver.log", level=logging.INFO, force=True)
    logging.captureWarnings(True)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", type=_list_of(_task), default=list(TASKS), help=f"some of {','.join(TASKS)}"
    )
    presets = list_presets()
    parser.add_argument(
        "--algos", type=_list_of(_algorithm), default=presets, help=f"some of {','.join(presets)}"
    )
    parser.add_argument("--seeds", type=_list_of(_positive), default=SEEDS)
    parser.add_argument("--rates", type=_list_of(_learning_rate), default=LEARNING_RATES)
    parser.add_argument("--tuning-seed", type=_positive, default=TUNING_SEED)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--tokens", type=_positive, default=BUDGET_TOKENS, help="tokens that each run generates"
    )
    budget.add_argument("--steps", type=_positive, help="steps of each run, instead of --tokens")
    parser.add_argument(
        "--marks", type=_positive, default=NUM_EVALUATIONS, help="evaluations of each run"
    )
    parser.add_argument("--save-every", type=_positive, default=10, help="steps per checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--page", type=Path, help="a copy of the page, such as docs/scoreboard.md")
    parser.add_argument(
        "--results", type=Path, help="a file of finished runs, to continue on other machines"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs")
    add_quick_option(parser, arguments, **QUICK_OPTIONS)
    args = parser.parse_intermixed_args(arguments)
    if args.quick:
        args.overrides = [*QUICK_OVERRIDES, *args.overrides]
    if args.tuning_seed in args.seeds:
        parser.error(f"--tuning-seed {args.tuning_seed}: expected a seed that is not in --seeds")
    return args


def _list_of[ItemT](parse: Callable[[str], ItemT]) -> Callable[[str], list[ItemT]]:
    def parse_list(text: str) -> list[ItemT]:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))

    return parse_list


def _task(text: str) -> str:
    return _one_of(text, text, TASKS)


def _algorithm(text: str) -> str:
    return _one_of(text, text.split("+")[0], list_presets())


def _one_of(text: str, name: str, known: Collection[str]) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(known)}")
    return text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def _learning_rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {value:g}, expected a learning rate below 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
