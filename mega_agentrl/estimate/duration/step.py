"""Predicts a step's seconds by phase, the MFU of the update, and the idle share of both sides.

What overlaps depends on the run, for a rollout R, learning L (log-probs, reference, critic, update,
driver, checkpoint, moving states between shared GPUs and host memory) and a weight update W:

    colocated                         R + L + W
    max_staleness=0                   R + L + W, in which each side waits for the other
    max_staleness=1                   max(R, L) + W, also in flight, where engines pause for W alone
    max_staleness>1                   the same, and the tail of R overlaps with the next rollout
    partial_rollout, oversampled      as its mode, without the tail of R

A side is idle while it has no work: the policy until a rollout ends, engines until they may start
the next one or while all their trajectories wait for tools. The tail of a rollout and the bubble of
a pipeline are no idle time; they are shown on their own. The figures are predictions from the
speeds in `speeds` and assumed lengths: tens of percent, not single ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.estimate.duration.passes import PassTime, PolicyModel
from mega_agentrl.estimate.duration.rollout import EngineModel, predict_rollout
from mega_agentrl.estimate.memory.model_state import estimate_model_state, num_parameters
from mega_agentrl.estimate.preflight.suggestions import num_required_gpus

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.duration.rollout import RolloutTime
    from mega_agentrl.estimate.duration.speeds import DeviceSpeeds
    from mega_agentrl.estimate.duration.workload import Workload
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_CHECKPOINT_BYTES = 14
"""Bytes of a checkpoint for each parameter: weights in bfloat16, master weights, two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The predicted step."""

    rollout: RolloutTime
    log_probs: PassTime
    """The pass of the old log-probs, which takes no time in a run without it."""
    reference: PassTime | None
    """The pass of the reference's log-probs, without the exchange of weights with the host."""
    critic_s: float
    """Values and update of the critic, 0 without one; a policy on other GPUs waits meanwhile."""
    update: PassTime
    driver_s: float
    """Packing, advantages and metrics on the driver."""
    weight_update_s: float
    offload_s: float
    """On shared GPUs, moving the state of models to host memory and back."""
    checkpoint_s: float
    """A checkpoint, divided by the steps between two."""
    total_s: float
    """The whole step."""
    mfu: float
    """Model FLOPs of the update over its seconds and the peak of the policy's GPUs."""
    policy_idle: float
    """Share of the step in which the policy's GPUs have no work."""
    engine_idle: float
    """The same for the engines' GPUs; on shared GPUs both are the same."""
    num_gpus: int

    @property
    def idle(self) -> float:
        """Idle share of the side that idles more."""
        return max(self.policy_idle, self.engine_idle)

    @property
    def gpu_hours_per_100_steps(self) -> float:
        """GPU hours of a hundred steps."""
        return self.total_s * self.num_gpus * 100 / 3600


def predict_step(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    speeds: DeviceSpeeds,
    workload: Workload,
    *,
    transfer_s: float = 0.0,
) -> StepTime:
    """Predict the duration of a step.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        speeds: Its speeds.
        workload: The trajectories of the step.
        transfer_s: Seconds of a weight update on the links (`weight_transfer`).
    """
    policy = PolicyModel(
        config=config, shape=shape, device=device, speeds=speeds, workload=workload
    )
    engine = EngineModel(config=config, shape=shape, device=device, speeds=speeds)
    rollout = predict_rollout(engine, workload)
    scoring, update = policy.scoring_pass(), policy.update()
    log_probs = scoring if config.has_scoring_pass else PassTime()
    reference = scoring if config.algo.needs_reference else None
    # The critic has the policy's layout and no vocabulary; its head costs next to nothing.
    critic_s = scoring.total + update.total if config.algo.needs_critic else 0.0
    driver_s = workload.num_tokens * speeds.driver_token_s
    nodes = max(1.0, config.parallel.world_size / device.gpus_per_node)
    checkpoint_s = 0.0
    if config.save_every_steps:
        num_bytes = num_parameters(shape) * _CHECKPOINT_BYTES
        checkpoint_s = num_bytes / (nodes * speeds.disk) / config.save_every_steps
    weight_update_s = transfer_s + speeds.update_overhead_s
    busy_s = log_probs.total + update.total + checkpoint_s
    busy_s += reference.total if reference else 0.0
    offload_s = _offload_s(config, shape, device, speeds)
    learning_s = busy_s + critic_s + offload_s + driver_s
    rollout_s, total_s = _overlap(config, rollout, learning_s, weight_update_s)
    engine_busy_s = rollout_s - rollout.wait_s + weight_update_s
    policy_busy_s = busy_s + offload_s + weight_update_s
    if config.cluster.colocated_models:
        policy_busy_s += critic_s
    if config.cluster.colocated:
        policy_busy_s = engine_busy_s = policy_busy_s + engine_busy_s - weight_update_s
    peak = speeds.peak_flops * config.parallel.world_size
    return StepTime(
        rollout=rollout,
        log_probs=log_probs,
        reference=reference,
        critic_s=critic_s,
        update=update,
        driver_s=driver_s,
        weight_update_s=weight_update_s,
        offload_s=offload_s,
        checkpoint_s=checkpoint_s,
        total_s=total_s,
        mfu=policy.model_flops() / (update.total * peak),
        policy_idle=max(0.0, 1 - policy_busy_s / total_s),
        engine_idle=max(0.0, 1 - engine_busy_s / total_s),
        num_gpus=num_required_gpus(config),
    )


def _overlap(
    config: TrainConfig,
    rollout: RolloutTime,
    learning_s: float,
    weight_update_s: float,
) -> tuple[float, float]:
    """Return the seconds of a rollout within a step, and of the step."""
    settings = config.rollout
    rollout_s = rollout.total_s
    continues = settings.partial_rollout and settings.num_oversampled_prompts > 0
    if settings.max_staleness > 1 or continues:
        rollout_s = min(rollout_s, rollout.without_tail_s)
    if not settings.max_staleness:
        return rollout_s, rollout_s + learning_s + weight_update_s
    return rollout_s, max(rollout_s, learning_s) + weight_update_s


def _offload_s(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, speeds: DeviceSpeeds
) -> float:
    """Return the seconds in which models leave shared GPUs and come back; all are of one size."""
    if not device.is_gpu:
        return 0.0
    item = device.item_bytes(config.model.dtype)
    state = estimate_model_state(shape, config.parallel, 0, item_bytes=item)
    moved = (state.weights + state.optimizer) * config.cluster.colocated
    if config.cluster.colocated_models:
        for model in config.auxiliary_models:
            moved += state.weights + state.optimizer
            moved += state.weights + (state.optimizer if model == "critic" else 0)
    return 2 * moved / speeds.host_link
