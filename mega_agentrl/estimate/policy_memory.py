"""Memory of the policy's ranks, part by part, for every pipeline stage.

    always       weights, gradients, optimizer, runtime
    at one time  either a training pass (activations, and on top the head's workspace or that of
                 one layer's backward pass), or the reference's way onto the device, piece by
                 piece, or two buckets of the weight transfer

The peak is what is always there plus the largest of the rest.

On GPUs that engines share (`cluster.colocated`) a sleeping engine leaves something there all the
while, and there is one more moment, the transfer, with the weights of both but neither gradients
and optimizer nor a KV cache. Where that is the most, it is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.estimate.activation import Kernels, layer_workspace, stage_activations
from mega_agentrl.estimate.device import CPU_LIBRARIES_BYTES
from mega_agentrl.estimate.engine_memory import engine_memory
from mega_agentrl.estimate.model_state import model_state
from mega_agentrl.estimate.vocab_head import head_workspace

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.reshard.model_shape import ModelShape

_MIB = 2**20
_REFERENCE_PIECE_BYTES = 256 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMemory:
    """Bytes on a rank of one stage. logits: the head's workspace, 0 but on the last stage.
    layer: of the backward pass of one layer. transfer: buckets. host: pinned, for the reference,
    on shared GPUs also for all that makes room there. neighbour: of an engine that sleeps on the
    same GPU. both: of the moment in which that has its weights beside these; 0 without one.
    """

    stage: int
    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    layer: int
    transfer: int
    reference: int
    runtime: int
    host: int
    neighbour: int = 0
    both: int = 0

    @property
    def peak(self) -> int:
        """The most that is there at one time."""
        fixed = self.weights + self.gradients + self.optimizer + self.runtime
        training = self.activations + max(self.logits, self.layer)
        if not self.neighbour:
            return fixed + max(training, self.transfer, self.reference)
        # The link's buckets are there from the first transfer on.
        learning = fixed + self.transfer + max(training, self.reference) + self.neighbour
        return max(learning, self.both)


def policy_memory(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    *,
    imbalance: float = 1.0,
    micro_batch_tokens: int | None = None,
) -> list[PolicyMemory]:
    """By pipeline stage. imbalance: tokens of the busiest expert rank over the mean.
    micro_batch_tokens: of the largest micro-batch, where it is known; else the most there can be.

    A run that only evaluates has no gradients and no optimizer; its policy makes no pass at all.
    Raises `ValueError` where the cut does not divide the model.
    """
    layout = config.parallel
    kernels = Kernels(item_bytes=device.train_item_bytes(config.model.dtype), fused=device.is_gpu)
    tokens, num_micro_batches = micro_batches(config)
    trains = not config.validates_only
    tokens = micro_batch_tokens or tokens
    found = []
    for stage in range(layout.pipeline):
        state = model_state(shape, layout, stage, item_bytes=kernels.item_bytes)
        is_last = stage == layout.pipeline - 1
        activations = stage_activations(
            shape, layout, stage, tokens, kernels,
            num_micro_batches=num_micro_batches, imbalance=imbalance,
        )  # fmt: skip
        layer = layer_workspace(shape, layout, tokens, kernels, imbalance=imbalance)
        activations = round(activations) if trains else 0
        logits = head_workspace(shape, layout.tensor, tokens, kernels) if is_last else 0
        workspace = round(layer) + state.largest if trains else 0
        runtime = device.policy_runtime_bytes
        bucket = config.weights.bucket_mib * _MIB
        if not device.is_gpu:
            # Models so small that a bucket holds no more than the rank has to send.
            bucket = min(bucket, state.weights)
            runtime = CPU_LIBRARIES_BYTES
        reference = config.algo.needs_reference and trains
        gradients, optimizer = (state.gradients, state.optimizer) if trains else (0, 0)
        host = state.host_copy if reference else 0
        neighbour = both = 0
        if config.cluster.colocated and device.is_gpu:
            engine = engine_memory(config, shape, device)
            neighbour = engine.asleep
            both = state.weights + 2 * bucket + runtime + engine.loading
            host += state.weights + optimizer
        found.append(
            PolicyMemory(
                stage=stage,
                num_parameters=state.num_parameters,
                weights=state.weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=activations,
                logits=logits,
                layer=workspace,
                transfer=2 * bucket,
                reference=min(_REFERENCE_PIECE_BYTES, state.weights) if reference else 0,
                runtime=runtime,
                host=host,
                neighbour=neighbour,
                both=both,
            )
        )
    return found


def longest_row(config: TrainConfig) -> int:
    """Tokens of the longest row that a micro-batch must hold."""
    if config.rollout.use_inference_chat_template:
        return config.engine.max_model_len
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def micro_batches(config: TrainConfig) -> tuple[int, int]:
    """Tokens of a micro-batch on one rank, and how many there are in an optimizer step.

    Both with every trajectory at its full length, which is the most there can be.
    """
    layout, budget = config.parallel, config.optim.micro_batch_tokens
    row = longest_row(config)
    rows = config.data.prompts_per_step * config.rollout.num_trajectories
    share = max(1, -(-rows // (config.optim.num_minibatches * layout.data)))
    fitting = max(1, budget * layout.context // row)
    count = -(-share // fitting)
    multiple = layout.pipeline if layout.virtual > 1 else 1
    tokens = min(budget, -(-share * row // layout.context))
    return max(1, tokens), -(-count // multiple) * multiple
