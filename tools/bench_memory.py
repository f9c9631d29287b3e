"""Compares predicted and measured memory of a finished CPU run, one JSON line per case.

    python -m mega_agentrl experiment=smoke_ci
    python tools/bench_memory.py runs/smoke_ci

A line has the keys bench, case, unit, ours (predicted), baseline (measured) and ratio = measured /
predicted. The measured values are the last `memory/*` metrics of the run: the largest peak of a
policy rank or engine worker without its libraries (`estimate.host_memory`). The predicted values
are the preflight's peaks for the same settings, for a policy rank with the largest micro-batch that
occurred. The memory of the libraries has its own line, which has no prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.estimate.device import MIB, DeviceSpec  # noqa: E402
from mega_agentrl.estimate.memory.engine import estimate_engine_memory  # noqa: E402
from mega_agentrl.estimate.memory.policy import estimate_policy_memory  # noqa: E402
from mega_agentrl.report.metrics_file import read_metrics  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from tools.measurement import bench_line  # noqa: E402


def comparison_lines(
    config: TrainConfig, measured: Mapping[str, float]
) -> Iterator[dict[str, object]]:
    """Yield the lines of all cases; `measured` holds metrics by name."""
    device, shape = DeviceSpec(memory_gib=None), ModelShape.from_folder(config.model.path)
    tokens = round(measured["memory/max_micro_batch_tokens"])
    stages = estimate_policy_memory(config, shape, device, micro_batch_tokens=tokens)
    predicted = {
        "policy": max(stage.peak for stage in stages) / MIB,
        "engine": estimate_engine_memory(config, shape, device).peak / MIB,
    }
    for process, peak_mib in predicted.items():
        measured_mib = measured[f"memory/{process}_peak_mib"]
        libraries_mib = measured[f"memory/{process}_libraries_mib"]
        yield bench_line("memory", f"{process}/peak", "MiB", peak_mib, measured_mib)
        yield bench_line("memory", f"{process}/libraries", "MiB", None, libraries_mib)


def read_run_metrics(folder: Path) -> tuple[TrainConfig, dict[str, float]]:
    """Return the configuration of a run and its last memory metrics.

    Raises:
        ValueError: the run has no memory metrics.
    """
    metrics = {
        name: value
        for line in read_metrics(folder / "metrics.jsonl").lines_of_stage("rl")
        for name, value in line.values.items()
        if name.startswith("memory/")
    }
    if "memory/policy_libraries_mib" not in metrics or "memory/engine_libraries_mib" not in metrics:
        raise ValueError(
            f"{folder}: got no memory/*_libraries_mib in metrics.jsonl, expected those of an RL "
            "step; probable cause: a run on GPUs, or one without an RL step"
        )
    saved = OmegaConf.load(folder / "config.yaml")
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), saved)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig)
    return config, metrics


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines; return 2 for a folder without the metrics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_folder", type=Path, help="folder of a run on CPUs")
    args = parser.parse_args(arguments)
    try:
        for line in comparison_lines(*read_run_metrics(args.run_folder)):
            print(json.dumps(line))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
