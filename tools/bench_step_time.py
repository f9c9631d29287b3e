"""Compares predicted steps (`estimate.duration`) with measured ones on this machine's CPUs.

    python tools/bench_step_time.py [--quick] [--model FOLDER] [--data FOLDER] [--steps N]
        [--prompts N] [--cases NAME ...] [--bound SHARE]

First a few runs calibrate the speeds of a core: FLOP/s, seconds a kernel, a collective, an engine's
step and each request in it, a weight update, and a token on the driver. They are fitted so that the
predicted phases are those measured. Then other runs are predicted with these speeds and the lengths
that they turned out to have, and measured:

    smoke         the smoke run: two tensor ranks, 32 prompts of 8 trajectories
    laptop        a model of 8 layers, 320 wide, on one rank
    pipeline      two pipeline stages
    asynchronous  rollout.max_staleness=1, a policy of one rank

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours; cases are
NAME/rollout, NAME/learning (all other phases) and NAME/step in seconds. `ours` is predicted,
`baseline` the mean of all steps but the first and the last. Ends with code 1 if a step differs by
more than `--bound` (default 0.25; with `--quick` there is no bound). Nothing else may run on the
machine. The model must call tools: by default the one that `make smoke` leaves in runs/smoke/model.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.estimate.device import DeviceSpec  # noqa: E402
from mega_agentrl.estimate.duration.speeds import DeviceSpeeds  # noqa: E402
from mega_agentrl.estimate.duration.step import StepTime, predict_step  # noqa: E402
from mega_agentrl.estimate.duration.workload import measured_workload  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from mega_agentrl.reshard.topology import LinkSpeeds  # noqa: E402
from tools import bench_async  # noqa: E402
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402
from tools.preflight_parts.compose import compose_config  # noqa: E402

FIRST_GUESS = DeviceSpeeds(
    peak_flops=2e10, memory=1e10, links=LinkSpeeds(same_gpu=4e9, same_node=4e9, network=4e9),
    matmul=1.0, grouped=1.0, attention=1.0, elementwise=1.0, decode=1.0, collectives=1.0,
    launch_s=2e-5, collective_s=1e-4, engine_step_s=1e-2, engine_request_s=1e-4, request_s=5e-3,
    update_overhead_s=0.2, driver_token_s=1e-5, launches_overlap=False,
)  # fmt: skip
FITTED = (
    "peak_flops", "launch_s", "collective_s", "engine_step_s", "engine_request_s",
    "update_overhead_s", "driver_token_s",
)  # fmt: skip
NUM_FIT_STEPS = 12
MAX_CHANGE = 1.0
"""Largest change of the logarithm of a constant in one step of the fit."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run to measure."""

    name: str
    overrides: tuple[str, ...]
    prompts: int = 32
    staleness: int = 0
    is_large: bool = False
    """Whether it trains the laptop-sized model."""


CALIBRATION = (
    Run("few", ("parallel.tensor=1",), prompts=8),
    Run("many", ("parallel.tensor=1",), prompts=48),
    Run("two ranks", ("parallel.tensor=2",), prompts=16),
)
CASES = (
    Run("smoke", ("parallel.tensor=2",)),
    Run("laptop", ("parallel.tensor=1",), prompts=8, is_large=True),
    Run("pipeline", ("parallel.tensor=1", "parallel.pipeline=2")),
    Run("asynchronous", ("parallel.tensor=1",), staleness=1),
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run with the phases of its steps."""

    run: Run
    config: TrainConfig
    shape: ModelShape
    metrics: Mapping[str, float]
    """Mean of each metric over the steps."""

    def phases(self) -> dict[str, float]:
        """Return the measured seconds by phase."""
        time = {name: value for name, value in self.metrics.items() if name.startswith("time/")}
        rollout_s = time.pop("time/rollout_s")
        names = ("logprob", "update", "weight_sync")
        parts = {name: time.pop(f"time/{name}_s") for name in names}
        return {"rollout": rollout_s, **parts, "driver": sum(time.values())}

    def predict(self, speeds: DeviceSpeeds) -> StepTime:
        """Predict a step with the lengths that this run had."""
        workload = measured_workload(self.config, self.metrics)
        return predict_step(self.config, self.shape, DeviceSpec(memory_gib=None), speeds, workload)


def predicted_phases(step: StepTime, *, staleness: int) -> dict[str, float]:
    """Return the predicted seconds by phase; a run ahead of training waits for rollouts only."""
    learning = {
        "logprob": step.log_probs.total,
        "update": step.update.total,
        "weight_sync": step.weight_update_s,
        "driver": step.driver_s + step.checkpoint_s,
    }
    rollout_s = step.rollout.total_s
    if staleness:
        rollout_s = step.total_s - sum(learning.values())
    return {"rollout": rollout_s, **learning}


def measure(run: Run, args: argparse.Namespace, folder: Path) -> MeasuredRun:
    """Run the training loop of a case."""
    model = args.large_model if run.is_large else args.model
    prompts = max(2, round(run.prompts * args.prompts / 32))
    settings = argparse.Namespace(
        model=model, data=args.data, prompts=prompts, steps=args.steps, slowest=0.0,
        overrides=[*run.overrides, "rollout.group_size=8"],
    )  # fmt: skip
    steps = bench_async.run(settings, run.staleness, folder)
    numbers = [name for name, value in steps[0].items() if isinstance(value, int | float)]
    metrics = {name: fmean(step.get(name, 0.0) for step in steps) for name in numbers}
    config = compose_config(
        [
            "experiment=smoke_ci", *settings.overrides, f"data.prompts_per_step={prompts}",
            "save_every_steps=0", f"rollout.max_staleness={run.staleness}",
        ],
        model_path=str(model),
    )  # fmt: skip
    return MeasuredRun(run, config, ModelShape.from_folder(model), metrics)


def fit_speeds(runs: Sequence[MeasuredRun], first: DeviceSpeeds = FIRST_GUESS) -> DeviceSpeeds:
    """Return the speeds with which the predicted phases are closest to the measured ones.

    The squared logarithms of predicted / measured are minimised (Levenberg-Marquardt), weighted by
    the phases' seconds.
    """
    measured = np.array([value for one in runs for value in one.phases().values()])
    weights = np.sqrt(measured / measured.sum())

    def residuals(point: np.ndarray) -> np.ndarray:
        speeds = replace(first, **dict(zip(FITTED, np.exp(point), strict=True)))
        predicted = [
            value
            for one in runs
            for value in predicted_phases(one.predict(speeds), staleness=0).values()
        ]
        return weights * np.log(np.maximum(predicted, 1e-6) / np.maximum(measured, 1e-6))

    point = np.log([getattr(first, name) for name in FITTED])
    damping = 1e-3
    best = residuals(point)
    for _ in range(NUM_FIT_STEPS):
        columns = [(residuals(point + 0.01 * axis) - best) / 0.01 for axis in np.eye(len(FITTED))]
        slope = np.stack(columns, axis=1)
        normal = slope.T @ slope + damping * np.eye(len(FITTED))
        change = np.clip(-np.linalg.solve(normal, slope.T @ best), -MAX_CHANGE, MAX_CHANGE)
        candidate = residuals(point + change)
        if candidate @ candidate < best @ best:
            point, best, damping = point + change, candidate, damping / 4
        else:
            damping *= 8
    return replace(first, **dict(zip(FITTED, map(float, np.exp(point)), strict=True)))


def compare(one: MeasuredRun, speeds: DeviceSpeeds) -> list[dict[str, object]]:
    """Return the lines of a case."""
    predicted = predicted_phases(one.predict(speeds), staleness=one.run.staleness)
    sides = (predicted, one.phases())

    def line(name: str, value: Callable[[Mapping[str, float]], float]) -> dict[str, object]:
        return bench_line("step_time", f"{one.run.name}/{name}", "s", *map(value, sides))

    return [
        line("rollout", lambda phases: phases["rollout"]),
        line("learning", lambda phases: sum(phases.values()) - phases["rollout"]),
        line("step", lambda phases: sum(phases.values())),
    ]


def make_large_model(source: Path, folder: Path) -> Path:
    """Write a random model of 8 layers, 320 wide, with the tokenizer of another; return it."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    config.update(
        {
            "num_hidden_layers": 8, "hidden_size": 320, "intermediate_size": 896,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 40,
            "layer_types": None, "max_window_layers": 8,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure and print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smoke/model")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/toolqa")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of the smoke run's steps")
    parser.add_argument("--bound", type=float, default=0.25, help="largest error of a step")
    parser.add_argument("--cases", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument("--calibrate", type=int, default=len(CALIBRATION), help=argparse.SUPPRESS)
    args = parse_options(
        parser, arguments, steps=3, prompts=4, bound=math.inf, cases=["smoke"], calibrate=1
    )
    try:
        names = select_cases(args.cases, [case.name for case in CASES])
    except ValueError as error:
        print(f"bench_step_time: {error}", file=sys.stderr)
        return 2
    if not (args.model / "config.json").is_file():
        print(f"bench_step_time: no model in {args.model}; `make smoke` leaves one",
              file=sys.stderr)  # fmt: skip
        return 2
    args.model, args.data = args.model.resolve(), args.data.resolve()
    is_within = True
    with tempfile.TemporaryDirectory(prefix="bench-step-time-") as name:
        folder = Path(name)
        with redirect_stdout(sys.stderr):
            if any(case.is_large for case in CASES if case.name in names):
                args.large_model = make_large_model(args.model, folder / "large")
            runs = [measure(run, args, folder / run.name) for run in CALIBRATION[: args.calibrate]]
            speeds = fit_speeds(runs)
            print({name: getattr(speeds, name) for name in FITTED})
        for case in CASES:
            if case.name not in names:
                continue
            with redirect_stdout(sys.stderr):
                measured = measure(case, args, folder / case.name)
            for line in compare(measured, speeds):
                print(json.dumps(line), flush=True)
            is_within &= abs(float(str(line["ours"])) / float(str(line["baseline"])) - 1) <= (
                args.bound
            )
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
