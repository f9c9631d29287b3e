"""Compares GRPO, ARPO soft and hard, ARPO + EGPO and ARES on the smoke task with equal budgets.

    python tools/compare_algos.py [--algos NAME,...] [--seeds K,...] [--tokens N | --steps N]
                                  [--marks N] [--save-every N] [--out FOLDER] [key=value ...]

All runs start from the same warm-started checkpoint and share one policy, one engine and one set of
tools, which are started once. Each run trains until it has generated `--tokens` tokens; the shared
prefix of forks counts once, since it is generated once. The held-out reward is evaluated at
`--marks` equal fractions of the budget, on the same questions with the same seeds. Input: `make
model`.

Writes `comparison.md`, `comparison.json` and `comparison.png` to the folder after every run, and
prints the table. It can be interrupted at any time: the same command continues, and finished runs
are not repeated. The folder of a run is described in `compare/run.py`.

Exit codes: 0 done, 2 bad input, 1 a failure, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.report.compare.algorithms import (  # noqa: E402
    RunCostCurve,
    algorithms_markdown,
    summarize_algorithms,
    write_cost_plot,
)
from mega_agentrl.report.progress import format_duration  # noqa: E402
from tools.compare.budget import Budget  # noqa: E402
from tools.compare.variants import (  # noqa: E402
    BASELINE,
    VARIANTS,
    Variant,
    check_run,
    make_config,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.report.compare.algorithms import EvalCostPoint

BUDGET_TOKENS = 200_000
NUM_EVALUATIONS = 10
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and return the exit code."""
    args = _parse(arguments)
    out = args.out.resolve()
    try:
        base, settings = make_config(args.overrides, run_dir=out)
        plan = [_make_run(name, seed, args, base) for seed in args.seeds for name in args.algos]
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"compare_algos: {error}", file=sys.stderr)
        return BAD_INPUT
    _log_to_file(out)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _compare(args, base, settings, plan, out)
    except KeyboardInterrupt:
        print("compare_algos: interrupted; the same command continues from here", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        logging.exception("the comparison failed")
        print(f"compare_algos: {error}\nmessages: {out / 'logs'}", file=sys.stderr)
        return FAILED
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One algorithm with one seed."""

    variant: Variant
    seed: int
    config: TrainConfig
    settings: dict[str, Any]
    """The settings stored in the run's folder; the folder refuses a run with others."""

    def curve(self, evaluations: tuple[EvalCostPoint, ...]) -> RunCostCurve:
        return RunCostCurve(algorithm=self.variant.title, seed=self.seed, eval_points=evaluations)


def _compare(
    args: argparse.Namespace,
    base: TrainConfig,
    settings: dict[str, Any],
    plan: Sequence[_Run],
    out: Path,
) -> None:
    # Imported here: torch is loaded only after the configurations have been checked.
    from tools.compare.run import read_result

    results = [(run, read_result(Path(run.config.run_dir), run.settings)) for run in plan]
    curves = [run.curve(evaluations) for run, evaluations in results if evaluations is not None]
    missing = [run for run, evaluations in results if evaluations is None]
    if missing:
        _run_all(args, base, settings, missing, curves, out)
    print(write_comparison(out, curves, args))
    print(f"plot: {out / 'comparison.png'}")


def _run_all(
    args: argparse.Namespace,
    base: TrainConfig,
    settings: dict[str, Any],
    missing: Sequence[_Run],
    curves: list[RunCostCurve],
    out: Path,
) -> None:
    """Run the missing runs and append their curves."""
    from mega_agentrl.runtime.build import build
    from mega_agentrl.runtime.cluster import ClusterConnection
    from mega_agentrl.runtime.inputs import read_inputs
    from tools.compare.run import ComparisonSetup, evaluate_warm, make_warm_start, run_once

    start_s = time.monotonic()
    with ClusterConnection(base) as cluster, build(base, read_inputs(base), cluster) as parts:
        warm = make_warm_start(parts, base, settings, out / "warm")
        before = evaluate_warm(parts, base, warm, out / "warm")
        setup = ComparisonSetup(
            components=parts, base_config=base, warm_start_folder=warm, initial_evaluation=before
        )
        print(f"warm start: held-out reward {before.reward:.3f}, success {before.success:.3f}")
        for run in missing:
            evaluations = run_once(setup, run.config, run.settings, _budget(args), args.save_every)
            curves.append(run.curve(evaluations))
            last = evaluations[-1]
            print(
                f"{run.variant.title}, seed {run.seed}: held-out reward {last.reward:.3f} after "
                f"{last.num_tokens:,} tokens and {last.num_tool_calls:,} tool calls; "
                f"{format_duration(time.monotonic() - start_s)} since the start",
                flush=True,
            )
            write_comparison(out, curves, args)


def write_comparison(out: Path, curves: Sequence[RunCostCurve], args: argparse.Namespace) -> str:
    """Write table, plot and numbers of the finished runs; return the table."""
    ordered = sorted(curves, key=lambda curve: (_title_order(curve.algorithm), curve.seed))
    rows = summarize_algorithms(ordered, baseline=BASELINE.title)
    notes = [f"Budget: {_budget(args)} per run; all runs start from the same warm start."]
    notes += [VARIANTS[name].note for name in args.algos if VARIANTS[name].note]
    text = algorithms_markdown(rows, baseline=BASELINE.title) + "\n" + "\n".join(notes) + "\n"
    (out / "comparison.md").write_text(text, encoding="utf-8")
    numbers = {"rows": [asdict(row) for row in rows], "runs": [asdict(curve) for curve in ordered]}
    (out / "comparison.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    write_cost_plot(out / "comparison.png", ordered, baseline=BASELINE.title)
    return text


def _title_order(title: str) -> int:
    return [variant.title for variant in VARIANTS.values()].index(title)


def _make_run(name: str, seed: int, args: argparse.Namespace, base: TrainConfig) -> _Run:
    folder = args.out / f"{name}-seed{seed}"
    overrides = (*args.overrides, *VARIANTS[name].overrides)
    config, settings = make_config(overrides, run_dir=folder, seed=seed)
    check_run(config, base)
    settings["budget"] = asdict(_budget(args))
    return _Run(variant=VARIANTS[name], seed=seed, config=config, settings=settings)


def _budget(args: argparse.Namespace) -> Budget:
    return Budget(num_tokens=args.tokens, num_steps=args.steps, num_evaluations=args.marks)


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
    known = ",".join(VARIANTS)
    parser.add_argument("--algos", type=_names, default=list(VARIANTS), help=f"some of {known}")
    parser.add_argument("--seeds", type=_seeds, default=[1, 2, 3], help="such as 1,2,3")
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
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs")
    return parser.parse_intermixed_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(map(repr, unknown))}, expected some of {', '.join(VARIANTS)}"
        )
    return list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
