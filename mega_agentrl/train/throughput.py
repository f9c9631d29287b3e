"""How fast a step was: tokens a second, and the share of the GPUs' peak that the update reached.

perf/tokens_per_s   response tokens of the batch over the seconds of all phases
perf/mfu            model FLOPs of the update (`estimate.flops`) over its seconds, the policy's
                    GPUs and their bfloat16 peak (`estimate.peak`); not there on a CPU or on a
                    GPU whose peak is not known
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.estimate.flops import train_flops
from mega_agentrl.estimate.peak import peak_flops
from mega_agentrl.reshard.model_shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch

UPDATE = "update"
"""Name of the phase that trains."""


class Throughput:
    """The metrics of a run's steps. gpu_name: of the policy's ranks; empty on CPUs."""

    def __init__(self, config: TrainConfig, gpu_name: str) -> None:
        peak = peak_flops(gpu_name)
        self._peak = None if peak is None else peak * config.parallel.num_ranks
        self._shape = None if peak is None else ModelShape.from_folder(config.model.path)

    def of(self, batch: TrainBatch, phase_s: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the step that trained on the batch; phase_s: seconds of its phases."""
        responses = batch.length_B.tolist()
        metrics = {"perf/tokens_per_s": sum(responses) / sum(phase_s.values())}
        if self._shape is not None and self._peak is not None and phase_s.get(UPDATE):
            lengths = [
                len(prompt) + response
                for prompt, response in zip(batch.prompt_ids, responses, strict=True)
            ]
            flops = train_flops(self._shape, lengths, int(batch.mask_BT.sum()))
            metrics["perf/mfu"] = flops / (phase_s[UPDATE] * self._peak)
        return metrics
