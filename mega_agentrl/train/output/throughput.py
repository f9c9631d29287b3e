"""Throughput of a step.

perf/tokens_per_s   response tokens of the batch over the seconds of all phases
perf/mfu            model FLOPs of the update (`estimate.flops`) over its seconds, the policy's
                    GPUs and their bfloat16 peak (`estimate.gpu_peak_flops`); left out on CPUs and
                    on GPUs whose peak is unknown
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.estimate.flops import train_flops
from mega_agentrl.estimate.gpu_peak_flops import peak_flops
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch

UPDATE_PHASE = "update"
"""Name of the phase that trains."""


class ThroughputMeter:
    """Computes the throughput metrics of a run."""

    def __init__(self, config: TrainConfig, gpu_name: str) -> None:
        """Take the name of the policy's GPUs, which is empty on CPUs."""
        peak = peak_flops(gpu_name)
        self._peak_flops = None if peak is None else peak * config.parallel.world_size
        self._model_shape = None if peak is None else ModelShape.from_folder(config.model.path)

    def step_metrics(self, batch: TrainBatch, phase_s: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step that trained on `batch`, from the seconds of its phases."""
        responses = batch.length_B.tolist()
        metrics = {"perf/tokens_per_s": sum(responses) / sum(phase_s.values())}
        if (
            self._model_shape is not None
            and self._peak_flops is not None
            and phase_s.get(UPDATE_PHASE)
        ):
            lengths = [
                len(prompt) + response
                for prompt, response in zip(batch.prompt_ids, responses, strict=True)
            ]
            flops = train_flops(self._model_shape, lengths, int(batch.mask_BT.sum()))
            metrics["perf/mfu"] = flops / (phase_s[UPDATE_PHASE] * self._peak_flops)
        return metrics
