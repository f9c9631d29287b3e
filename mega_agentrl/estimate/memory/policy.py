"""Estimates the memory of the ranks of policy and critic, part by part, by pipeline stage.

    permanent    weights, gradients, optimizer, runtime
    alternating  a training pass: activations and the losses' tensors by row, plus the workspace of
                 the head, of one layer's backward pass, or of one layer's attention along the paths
                 of trees
                 or a chunk of the reference weights that is copied to the device
                 or two buckets of the weight transfer

The peak is the permanent part plus the largest alternating one. On shared GPUs
(`cluster.colocated`) a sleeping engine permanently keeps some memory. During the weight transfer
the weights of policy and engine are on the GPU, but no gradients, optimizer state or KV cache; this
may be the peak.

The critic is the policy's transformer with a scalar head, on ranks of its own. Its estimate is that
of a policy without vocabulary head, reference and weight transfer. With `cluster.colocated_models`
its ranks are on the policy's GPUs: the state of one model is there, and the runtimes of all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import TRITON_HEAD_DIMS
from mega_agentrl.config.enums import TreeAttention
from mega_agentrl.config.sections.policy import LoraConfig
from mega_agentrl.estimate.device import CPU_LIBRARIES_BYTES, MIB
from mega_agentrl.estimate.memory.activations import (
    KernelConfig,
    attention_plan_bytes,
    head_workspace_bytes,
    layer_backward_workspace_bytes,
    num_in_flight_passes,
    path_attention_bytes,
    recomputed_layer_bytes,
    row_tensor_bytes,
    stage_activation_bytes,
)
from mega_agentrl.estimate.memory.engine import estimate_engine_memory
from mega_agentrl.estimate.memory.micro_batches import bound_micro_batches, max_row_tokens
from mega_agentrl.estimate.memory.model_state import estimate_model_state, pinned_bytes
from mega_agentrl.estimate.memory.vision import max_image_tokens, vision_activation_bytes

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.memory.micro_batches import MicroBatchBounds
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_REFERENCE_CHUNK_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMemory:
    """Bytes on a rank of one pipeline stage."""

    stage: int
    """The pipeline stage."""
    num_parameters: int
    """Number of parameter elements."""
    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients."""
    optimizer: int
    """Bytes of the optimizer state."""
    activations: int
    """Bytes of the activations saved for the backward pass, with the indices by which the attention
    gathers keys along the paths of trees."""
    row_tensors: int
    """Bytes of the losses' tensors by row and response position, and of the indices that fill
    them. A tree has as many rows as trajectories, however many tokens they share."""
    head_workspace: int
    """Bytes of the vocabulary head's workspace, 0 except on the last stage."""
    layer_workspace: int
    """Temporary bytes of the backward pass of one layer, the recomputed activations included."""
    path_attention: int
    """Temporary bytes of the attention of one layer along the paths of trees, the recomputed
    activations included; 0 if no keys are gathered (`MicroBatchBounds.num_keys`)."""
    transfer_buckets: int
    """Bytes of the weight transfer's buckets."""
    reference_staging: int
    """Bytes of the device buffer through which reference weights are copied in chunks."""
    runtime: int
    """Bytes of the CUDA context and libraries."""
    pinned_host: int
    """Bytes of pinned host memory: the reference and, on shared GPUs, the offloaded state."""
    checkpoint_copy: int = 0
    """Bytes of the copy that a checkpoint is written from while the run goes on; 0 on GPUs, where
    it is `pinned_checkpoint`."""
    pinned_checkpoint: int = 0
    """Bytes of pinned host memory for that copy, which stay allocated; 0 on CPUs."""
    sleeping_engine: int = 0
    """Bytes of a sleeping engine on the same GPU."""
    offloaded_models: int = 0
    """Bytes that other models keep on the same GPU while their state is in host memory."""
    colocated_transfer_peak: int = 0
    """Bytes while both policy and engine weights are on a shared GPU; 0 on separate GPUs."""
    vision_activations: int = 0
    """Bytes that the vision tower keeps for the backward pass, and its features; 0 except on the
    first stage of a vision-language model."""

    @property
    def training_pass(self) -> int:
        """Peak bytes of the forward and backward passes, without the permanent part."""
        workspace = max(self.head_workspace, self.layer_workspace, self.path_attention)
        return self.activations + self.vision_activations + self.row_tensors + workspace

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        permanent = self.weights + self.gradients + self.optimizer + self.runtime
        permanent += self.checkpoint_copy + self.offloaded_models
        training = self.training_pass
        if not self.sleeping_engine:
            return permanent + max(training, self.transfer_buckets, self.reference_staging)
        # The transfer buckets stay allocated from the first transfer on.
        training_peak = (
            permanent
            + self.transfer_buckets
            + max(training, self.reference_staging)
            + self.sleeping_engine
        )
        return max(training_peak, self.colocated_transfer_peak)


def estimate_policy_memory(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    *,
    imbalance: float = 1.0,
    micro_batch_tokens: int | None = None,
) -> list[PolicyMemory]:
    """Return the policy's memory by pipeline stage.

    A run that only evaluates has weights, but no gradients, optimizer or activations.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        imbalance: Tokens of the busiest expert rank divided by the mean.
        micro_batch_tokens: Tokens of the largest micro-batch; None for the largest possible.

    Raises:
        ValueError: The parallel sizes do not divide the model.
    """
    bounds = bound_micro_batches(config, micro_batch_tokens)
    if not _gathers_keys(config, shape, device):
        bounds = replace(bounds, num_keys=0)
    return [
        _estimate_stage_memory(config, shape, device, stage, bounds, imbalance)
        for stage in range(config.parallel.pipeline)
    ]


def _gathers_keys(config: TrainConfig, shape: ModelShape, device: DeviceSpec) -> bool:
    """Return whether the attention gathers keys along the paths of trees with forks."""
    choice = config.model.tree_attention
    if choice is not TreeAttention.auto:
        return choice is TreeAttention.gather
    is_narrow = device.item_bytes(config.model.dtype) == 2
    return not (device.is_gpu and is_narrow and shape.head_dim in TRITON_HEAD_DIMS)


def _estimate_stage_memory(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    stage: int,
    bounds: MicroBatchBounds,
    imbalance: float,
) -> PolicyMemory:
    layout, trains, tokens = config.parallel, not config.is_eval_only, bounds.tokens
    kernels = KernelConfig(
        item_bytes=device.item_bytes(config.model.dtype),
        fused=device.is_gpu,
        max_path_tokens=max_row_tokens(config) if bounds.num_keys else 0,
    )
    is_last_stage = stage == layout.pipeline - 1
    frozen = config.model.freeze_vision or config.model.lora.rank > 0
    state = estimate_model_state(
        shape, layout, stage,
        item_bytes=kernels.item_bytes, freeze_vision=frozen, lora=config.model.lora,
    )  # fmt: skip
    activations = stage_activation_bytes(
        shape, layout, stage, tokens, kernels,
        num_micro_batches=bounds.num_micro_batches, imbalance=imbalance,
    )  # fmt: skip
    num_passes = sum(num_in_flight_passes(layout, stage, bounds.num_micro_batches))
    activations += num_passes * attention_plan_bytes(tokens, bounds.num_keys, kernels)
    recomputed = recomputed_layer_bytes(shape, layout, tokens, kernels, imbalance=imbalance)
    layer_workspace = recomputed + layer_backward_workspace_bytes(
        shape, layout, tokens, kernels, imbalance=imbalance
    )
    path_attention = path_attention_bytes(shape, layout, tokens, bounds.num_keys, kernels)
    if path_attention:
        path_attention += recomputed
    row_tensors = row_tensor_bytes(
        bounds.num_rows, config.rollout.max_response_tokens, has_loss=is_last_stage
    )
    head_workspace = 0
    if is_last_stage:
        head_workspace = head_workspace_bytes(shape, layout.tensor, tokens, kernels)
    runtime = device.policy_runtime_bytes
    bucket = config.weight_sync.bucket_mib * MIB
    if not device.is_gpu:
        # Models on CPUs are small: a bucket holds no more than the rank has to send.
        bucket = min(bucket, state.weights)
        runtime = CPU_LIBRARIES_BYTES
    reference = config.algo.needs_reference and trains
    gradients, optimizer = (state.gradients, state.optimizer) if trains else (0, 0)
    memory = PolicyMemory(
        stage=stage,
        num_parameters=state.num_parameters,
        weights=state.weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(activations) if trains else 0,
        row_tensors=row_tensors if trains else 0,
        head_workspace=head_workspace,
        layer_workspace=round(layer_workspace) + state.largest_parameter if trains else 0,
        path_attention=round(path_attention) if trains else 0,
        transfer_buckets=2 * bucket + state.merged_weights,
        reference_staging=(
            min(_REFERENCE_CHUNK_BYTES, state.reference_weights) if reference else 0
        ),
        runtime=runtime,
        pinned_host=state.host_copy_bytes if reference else 0,
        checkpoint_copy=state.checkpoint if trains and not device.is_gpu else 0,
        pinned_checkpoint=pinned_bytes(state.checkpoint) if trains and device.is_gpu else 0,
        vision_activations=(
            _vision_activations(config, shape, stage, bounds, kernels, frozen=frozen)
            if trains
            else 0
        ),
    )
    return _with_others_on_gpu(memory, config, shape, device) if device.is_gpu else memory


def _with_others_on_gpu(
    memory: PolicyMemory, config: TrainConfig, shape: ModelShape, device: DeviceSpec
) -> PolicyMemory:
    """Return the memory of a rank with what an engine and other models on its GPU keep there."""
    has_engine, has_models = config.cluster.colocated, config.cluster.colocated_models
    if has_engine or has_models:
        offloaded = memory.weights + memory.optimizer
        memory = replace(memory, pinned_host=memory.pinned_host + offloaded)
    if has_models:
        runtimes = len(config.auxiliary_models) * device.policy_runtime_bytes
        memory = replace(memory, offloaded_models=runtimes)
    if not has_engine:
        return memory
    engine = estimate_engine_memory(config, shape, device)
    sent = memory.weights + memory.transfer_buckets + memory.runtime + memory.offloaded_models
    return replace(
        memory,
        sleeping_engine=engine.sleeping_bytes,
        colocated_transfer_peak=sent + engine.loading_bytes,
    )


def _vision_activations(
    config: TrainConfig,
    shape: ModelShape,
    stage: int,
    bounds: MicroBatchBounds,
    kernels: KernelConfig,
    *,
    frozen: bool,
) -> int:
    """Return the bytes that the tower keeps, which is in the first chunk of the first stage."""
    if shape.vision is None or stage:
        return 0
    layout = config.parallel
    passes = num_in_flight_passes(layout, stage, bounds.num_micro_batches)[0]
    return passes * vision_activation_bytes(
        shape.vision,
        max_image_tokens(config, shape.vision, bounds.tokens),
        kernels.item_bytes,
        recompute=layout.recompute,
        frozen=frozen,
    )


def estimate_critic_memory(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, *, imbalance: float = 1.0
) -> list[PolicyMemory]:
    """Return the critic's memory by pipeline stage; empty without a critic.

    The arguments are those of `estimate_policy_memory`; `shape` is the shape of the policy.
    """
    if not config.algo.needs_critic or config.is_eval_only:
        return []
    config = replace(config, model=replace(config.model, lora=LoraConfig()))
    stages = estimate_policy_memory(config, shape.with_scalar_head(), device, imbalance=imbalance)
    unused_parts = dict.fromkeys(
        (
            "head_workspace",
            "transfer_buckets",
            "reference_staging",
            "pinned_host",
            "colocated_transfer_peak",
        ),
        0,
    )
    if not config.cluster.colocated_models:
        return [replace(memory, **unused_parts, sleeping_engine=0) for memory in stages]
    # The policy keeps its buckets.
    return [
        replace(
            memory,
            **unused_parts
            | {
                "offloaded_models": memory.offloaded_models + memory.transfer_buckets,
                "pinned_host": memory.weights + memory.optimizer,
            },
        )
        for memory in stages
    ]
