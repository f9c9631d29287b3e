"""Suggests changes where policy or engines wait for the other side for too large a part of a step.

Candidates are another mode (one step off, two steps ahead, shared GPUs), critic and reward model on
the policy's GPUs, data ranks that become engines or the reverse, and more or fewer engines. Each is
verified by the predictions of memory and duration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import RolloutCorrection
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.duration.step import predict_step
from mega_agentrl.estimate.preflight.suggestions import (
    engine_fits,
    make_change,
    policy_peak_gib,
    valid_candidates,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.duration.speeds import DeviceSpeeds
    from mega_agentrl.estimate.duration.step import StepTime
    from mega_agentrl.estimate.duration.workload import Workload
    from mega_agentrl.estimate.preflight.suggestions import ConfigChange, ConfigCheck, Overrides
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

MAX_IDLE = 0.15
"""Idle share above which changes are suggested."""


@dataclass(frozen=True, slots=True)
class BalanceChange:
    """A change of the configuration with the step that it makes."""

    change: ConfigChange
    step: StepTime

    def __str__(self) -> str:
        step = self.step
        return (
            f"{self.change}, {step.total_s:.0f} s a step, policy idle {step.policy_idle:.0%}, "
            f"engines {step.engine_idle:.0%}, {step.gpu_hours_per_100_steps:.0f} GPU hours for 100"
        )


def suggest_balance(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    speeds: DeviceSpeeds,
    workload: Workload,
    check: ConfigCheck,
    *,
    transfer_s: float = 0.0,
    imbalance: float = 1.0,
    limit: int = 3,
) -> list[BalanceChange]:
    """Return changes that lower the GPU hours of a step in which a side idles too long.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        speeds: Its speeds.
        workload: The trajectories of a step.
        check: Raises `ValueError` for a configuration that cannot run for other reasons.
        transfer_s: Seconds of a weight update on the links.
        imbalance: Tokens of the busiest expert rank divided by the mean, for the memory.
        limit: Maximum number of changes.

    Returns:
        The changes, those with the fewest GPU hours first; empty if no side idles too long.
    """

    def predict(changed: TrainConfig) -> StepTime:
        return predict_step(changed, shape, device, speeds, workload, transfer_s=transfer_s)

    now = predict(config)
    if now.idle <= MAX_IDLE:
        return []
    found = []
    for settings, changed in valid_candidates(config, _candidates(config), check):
        step = predict(changed)
        if step.gpu_hours_per_100_steps < now.gpu_hours_per_100_steps and step.idle < now.idle:
            found.append((step.gpu_hours_per_100_steps, settings, changed, step))
    changes: list[BalanceChange] = []
    for _, settings, changed, step in sorted(found, key=lambda one: one[0]):
        peak_gib = policy_peak_gib(changed, shape, device, imbalance=imbalance)
        if peak_gib <= device.usable_bytes / GIB and engine_fits(changed, shape, device):
            changes.append(BalanceChange(make_change(config, settings, peak_gib), step))
        if len(changes) == limit:
            break
    return changes


def _candidates(config: TrainConfig) -> Iterator[Overrides]:
    engines, layout = config.cluster.num_engines, config.parallel
    tensor = config.engine.tensor_parallel_size
    if config.auxiliary_models and not config.cluster.colocated_models:
        yield {"cluster.colocated_models": True}
    if config.cluster.colocated:
        return
    modes: list[Overrides] = [{}]
    if not config.rollout.max_staleness:
        yield {"cluster.colocated": True, "cluster.num_engines": layout.world_size // tensor}
        correction = config.algo.rollout_correction
        if correction is RolloutCorrection.none:
            correction = RolloutCorrection.token_truncate
        modes.append(
            {
                "rollout.max_staleness": 1,
                "weight_sync.in_flight": True,
                "algo.rollout_correction": correction,
            }
        )
    elif config.rollout.max_staleness == 1:
        modes.append({"rollout.max_staleness": 2})
    ranks = layout.world_size // layout.data
    for mode in modes:
        yield mode
        for data in range(1, 2 * layout.data + 1):
            moved = (layout.data - data) * ranks
            if moved % tensor == 0 and engines + moved // tensor > 0:
                number = engines + moved // tensor
                yield {**mode, "parallel.data": data, "cluster.num_engines": number}
        for number in range(max(1, engines // 2), 2 * engines + 1):
            yield {**mode, "cluster.num_engines": number}
