"""Write metrics, one JSON line per step, pass them to trackers, and time the phases of a step.

`metrics.jsonl` holds ``{"step": int, "stage": str, "<name>": float, ...}``. Names are
``area/name``; seconds are under ``time/``. A few values are strings, which trackers do not get. A
number that is not finite is null, because JSON has no other form for it. The file is plain text and
not a `types.journal`, because people and other programs read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.batch.tree_order import row_lengths
from mega_agentrl.estimate.flops import peak_flops, train_flops
from mega_agentrl.report.page.html import replace_non_finite
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.train.resume.run_dir import METRICS_FILE

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.monitoring import Tracker

UPDATE_PHASE = "update"
"""Name of the phase that trains."""


class PhaseTimer:
    """Seconds per named phase since the last `pop_seconds`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the body to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase so far."""
        return dict(self._seconds)

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class MetricWriter:
    """Appends to `metrics.jsonl` and passes numbers to the trackers, which the caller closes."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._trackers = trackers

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def write(self, stage: str, step: int, metrics: Mapping[str, float | str]) -> None:
        """Write one line; the trackers get numbers that are not finite as they are."""
        self._file.write(json_text({"stage": stage, "step": step, **metrics}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        for tracker in self._trackers:
            tracker.log(stage, step, numbers)


class ThroughputMeter:
    """Computes the throughput metrics of a step.

    perf/tokens_per_s         response tokens of the batch over the seconds of all phases
    perf/unique_tokens_per_s  the same with tokens that trajectories share counted once
    tree/token_ratio          tokens of all trajectories, prompts included, over those of the trees,
                              where shared ones count once
    perf/mfu                  model FLOPs of the update (`estimate.flops`; with `batch.trees`,
                              shared tokens count once, also where a cut tree computes them again;
                              rows that the update left out count nothing)
                              over its seconds, the number of the policy's GPUs and their bfloat16
                              peak; left out on CPUs and on unknown GPUs
    """

    def __init__(self, config: TrainConfig, gpu_name: str) -> None:
        """Create the meter; `gpu_name` is the CUDA name of the policy's GPUs, empty on CPUs."""
        peak = peak_flops(gpu_name)
        self._computes_trees = config.batch.trees
        self._peak_flops = None if peak is None else peak * config.parallel.world_size
        self._model_shape = None if peak is None else ModelShape.from_folder(config.model.path)

    def step_metrics(
        self, batch: TrainBatch, phase_s: Mapping[str, float], num_spared_tokens: float = 0.0
    ) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            batch: The batch that it trained on.
            phase_s: Seconds of its phases.
            num_spared_tokens: Tokens of the batch that the update left out; they are taken to have
                the mean cost.
        """
        num_s = sum(phase_s.values())
        in_response_BT = torch.arange(batch.response_BT.size(1)) < batch.length_B[:, None]
        num_unique = _count_unique(batch.tree_token_BT[in_response_BT])
        tree = row_lengths(batch)
        num_tree_tokens = int((tree.length_R - tree.shared_length_R).sum())
        metrics = {
            "perf/tokens_per_s": int(batch.length_B.sum()) / num_s,
            "perf/unique_tokens_per_s": num_unique / num_s,
            "tree/token_ratio": int(tree.length_R.sum()) / num_tree_tokens,
        }
        if (
            self._model_shape is not None
            and self._peak_flops is not None
            and phase_s.get(UPDATE_PHASE)
        ):
            rows = row_lengths(batch, share=self._computes_trees)
            num_trained = int(batch.mask_BT.sum())
            if self._computes_trees:
                num_trained = _count_unique(batch.tree_token_BT[batch.mask_BT])
            flops = train_flops(
                self._model_shape,
                rows.length_R.tolist(),
                num_trained,
                rows.shared_length_R.tolist(),
            )
            num_tokens = int((rows.length_R - rows.shared_length_R).sum())
            flops *= 1 - num_spared_tokens / num_tokens
            metrics["perf/mfu"] = flops / (phase_s[UPDATE_PHASE] * self._peak_flops)
        return metrics


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return plain values as standard JSON, with null for numbers that are not finite."""
    plain = replace_non_finite(value, lambda number: None)
    return json.dumps(plain, indent=indent, allow_nan=False)


def _count_unique(values: torch.Tensor) -> int:
    return len(np.unique(values.numpy()))
