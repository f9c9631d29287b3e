"""Predicts the seconds of the policy's passes over a batch, part by part.

A rank's part of a layer costs, forward, for its T tokens of a micro-batch

    matmul       FLOPs of the linears over tensor ranks, experts as grouped products
    attention    FLOPs of the scores on and below the diagonal
    elementwise  bytes of norms, rotary angles, activations, residuals, and of the permutation of
                 tokens to their experts and back
    collectives  tensor ranks: gathering and scattering of [T, h] around attention and dense MLP;
                 context ranks: their keys and values; stages: what they send each other
    all_to_all   k copies of a token's hidden state to its experts and back, between nodes over the
                 network
    launches     what the host needs longer for its kernels than the device computes

A backward pass costs twice as much, but 1.5 times the collectives and one all_to_all each way. With
`parallel.recompute` it first repeats the forward pass, or the part of MLP and experts. The
vocabulary head repeats its products in any case. Of m micro-batches on p stages of v chunks the
first and the last stage wait: a pass takes (m + (p - 1) / v) times the slowest stage.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import split_layers
from mega_agentrl.config.enums import Recompute
from mega_agentrl.estimate.flops import (
    FORWARD_BACKWARD_FACTOR,
    ForwardFlops,
    layer_flops_per_token,
)
from mega_agentrl.estimate.memory.model_state import estimate_model_state
from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.duration.speeds import DeviceSpeeds
    from mega_agentrl.estimate.duration.workload import Workload
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_DENSE_KERNELS, _EXPERT_KERNELS = 30, 80
"""Kernels that the forward pass of a layer launches."""
_FILL = 0.95
"""Share of a micro-batch's budget that packing fills."""
_OPTIMIZER_BYTES = 38
"""Bytes that an optimizer step moves for an element that a rank updates: gradient, its norm and its
zeros, moments and master weights read and written, and the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass by part."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    collectives: float = 0.0
    all_to_all: float = 0.0
    launches: float = 0.0
    """Excess of the host's launches over what the device computes meanwhile; on a CPU, all."""
    recompute: float = 0.0
    """Activations that the backward pass computes again."""
    bubble: float = 0.0
    """Waits of pipeline stages for each other."""
    optimizer: float = 0.0
    """Optimizer steps, with the exchange of gradients and weights between data ranks."""

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        return float(sum(astuple(self)))

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        )

    def scaled(self, factor: float, **factors: float) -> PassTime:
        """Return the parts times `factor`, or times their own factors."""
        return PassTime(
            **{name: getattr(self, name) * factors.get(name, factor) for name in self.__slots__}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Tokens and attention scores that the policy computes in a pass over a step's batch."""

    tokens: float
    scores: float
    """Pairs of a query and a key that it sees."""
    scored: float
    """Tokens that go through the output layer."""


def batch_tokens(config: TrainConfig, workload: Workload, *, trains: bool) -> BatchTokens:
    """Return what a pass over a step's batch computes, with trees cut to micro-batches.

    An update scores the tokens that were sampled, other passes those of tools as well.
    """
    prompt, response = workload.prompt_tokens, workload.response_tokens
    scored = workload.num_trajectories * (workload.sampled_tokens if trains else response)
    group, square = workload.group_size, workload.mean_square
    # A response sees the prompt and itself.
    scores = response * prompt + square / 2
    if not config.batch.trees:
        number = workload.num_trajectories
        return BatchTokens(
            tokens=number * (prompt + response),
            scores=number * (prompt**2 / 2 + scores),
            scored=scored,
        )
    own = 1 - workload.shared_tokens / response
    budget = config.optim.micro_batch_tokens * config.parallel.context
    parts = max(1, ceil(group * response * own / max(1.0, budget - prompt)))
    return BatchTokens(
        tokens=workload.num_prompts * (parts * prompt + group * response * own),
        scores=workload.num_prompts * (parts * prompt**2 / 2 + group * scores * own),
        scored=scored * own,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """Predicts the FLOPs and seconds of the policy's passes over a step's batch."""

    config: TrainConfig
    shape: ModelShape
    device: DeviceSpec
    speeds: DeviceSpeeds
    workload: Workload

    def model_flops(self) -> float:
        """Return the model FLOPs of an update, in which shared tokens count once."""
        workload, shape = self.workload, self.shape
        prompt, response = workload.prompt_tokens, workload.response_tokens
        shared = workload.shared_tokens if self.config.batch.trees else 0.0
        prompts = workload.num_prompts
        if not self.config.batch.trees:
            prompts *= workload.group_size
        own = workload.num_trajectories * (response - shared)
        scored = own * workload.sampled_tokens / response
        scores = prompts * prompt**2 / 2
        scores += own / response * (response * prompt + workload.mean_square / 2)
        per_token = sum(layer_flops_per_token(shape, layer) for layer in range(shape.num_layers))
        flops = ForwardFlops(
            linears=(prompts * prompt + own) * per_token,
            attention_scores=scores * 4 * shape.num_heads * shape.head_dim * shape.num_layers,
            output_layer=2.0 * shape.hidden_size * shape.vocab_size * scored,
        )
        return FORWARD_BACKWARD_FACTOR * flops.total

    def scoring_pass(self) -> PassTime:
        """Predict a forward pass over the batch, such as that of the old log-probs."""
        batch = batch_tokens(self.config, self.workload, trains=False)
        return self._pass(batch, num_steps=1, backward=False)

    def update(self) -> PassTime:
        """Predict the update: forward and backward passes and all optimizer steps."""
        batch = batch_tokens(self.config, self.workload, trains=True)
        steps = self.config.optim.num_minibatches
        return self._pass(batch, num_steps=steps, backward=True) + PassTime(
            optimizer=steps * self._optimizer_s()
        )

    def _pass(self, batch: BatchTokens, *, num_steps: int, backward: bool) -> PassTime:
        layout = self.config.parallel
        budget = self.config.optim.micro_batch_tokens * layout.context
        per_rank = batch.tokens / num_steps / layout.data
        number = max(1, ceil(per_rank / (budget * _FILL)))
        if layout.virtual_pipeline > 1:
            number = round_up(number, layout.pipeline)
        divisor = num_steps * layout.data * number
        micro = BatchTokens(
            tokens=batch.tokens / divisor,
            scores=batch.scores / divisor,
            scored=batch.scored / divisor,
        )
        stages = [self._stage(stage, micro, backward=backward) for stage in range(layout.pipeline)]
        slowest = max(stages, key=lambda stage: stage.total)
        bubble = (layout.pipeline - 1) / layout.virtual_pipeline * slowest.total
        return (slowest.scaled(number) + PassTime(bubble=bubble)).scaled(num_steps)

    def _stage(self, stage: int, micro: BatchTokens, *, backward: bool) -> PassTime:
        """Return the time of one micro-batch on all chunks of a pipeline rank."""
        layout = self.config.parallel
        stages = split_layers(self.shape.num_layers, layout.pipeline * layout.virtual_pipeline)
        kinds: dict[bool, list[int]] = {}
        for layers in stages[stage :: layout.pipeline]:
            for layer in layers:
                kinds.setdefault(self.shape.is_moe_layer(layer), []).append(layer)
        total = PassTime()
        for alike in kinds.values():
            total += self._layer(alike[0], micro, backward=backward).scaled(len(alike))
        if layout.pipeline > 1 and layout.virtual_pipeline == 1:  # else it overlaps
            sent = 4 if backward else 2
            num_bytes = micro.tokens / layout.context / self._sequence_size * self._hidden_bytes
            is_near = layout.world_size <= self.device.gpus_per_node
            total += PassTime(collectives=sent * self._link_s(num_bytes, near=is_near))
        if stage == layout.pipeline - 1:
            flops = 2 * self.shape.hidden_size * self.shape.vocab_size * micro.scored
            flops /= layout.tensor * layout.context
            head_s = flops / (self.speeds.peak_flops * self.speeds.matmul)
            total += PassTime(matmul=head_s * (4 if backward else 1))
        return total

    def _layer(self, layer: int, micro: BatchTokens, *, backward: bool) -> PassTime:
        attention = self._attention(micro)
        inner = self._experts(micro) if self.shape.is_moe_layer(layer) else self._mlp(micro)
        forward = self._with_launches(attention + inner, layer, 1)
        if not backward:
            return forward
        factors = {"collectives": 1.5, "all_to_all": 1.0}
        again = {
            Recompute.none: PassTime(),
            Recompute.selective: inner,
            Recompute.full: attention + inner,
        }[self.config.parallel.recompute]
        both = (attention + inner) + (attention + inner).scaled(2.0, **factors)
        return self._with_launches(both, layer, 3) + PassTime(recompute=again.total)

    def _attention(self, micro: BatchTokens) -> PassTime:
        shape, layout, speeds = self.shape, self.config.parallel, self.speeds
        tokens = micro.tokens / layout.context
        heads = (shape.num_heads + shape.num_kv_heads) / layout.tensor * shape.head_dim
        flops = tokens * 4 * shape.hidden_size * heads
        scores = 4 * shape.num_heads / layout.tensor * shape.head_dim * micro.scores
        outer = 5 * self._hidden_bytes / self._sequence_size
        moved = tokens * (outer + 8 * heads * self._item_bytes)
        kv_bytes = 2 * shape.num_kv_heads / layout.tensor * shape.head_dim * self._item_bytes
        near = layout.tensor * layout.context <= self.device.gpus_per_node
        context_s = 0.0
        if layout.context > 1:
            context_s = self._link_s((layout.context - 1) * tokens * kv_bytes, near=near)
        return PassTime(
            matmul=flops / (speeds.peak_flops * speeds.matmul),
            attention=scores / layout.context / (speeds.peak_flops * speeds.attention),
            elementwise=moved / (speeds.memory * speeds.elementwise),
            collectives=self._tensor_s(tokens) + context_s,
        )

    def _mlp(self, micro: BatchTokens) -> PassTime:
        shape, layout, speeds = self.shape, self.config.parallel, self.speeds
        tokens = micro.tokens / layout.context
        width = shape.ffn_hidden_size / layout.tensor
        flops = tokens * 6 * shape.hidden_size * width
        outer = 5 * self._hidden_bytes / self._sequence_size
        moved = tokens * (outer + 3 * width * self._item_bytes)
        return PassTime(
            matmul=flops / (speeds.peak_flops * speeds.matmul),
            elementwise=moved / (speeds.memory * speeds.elementwise),
            collectives=self._tensor_s(tokens),
        )

    def _experts(self, micro: BatchTokens) -> PassTime:
        shape, layout, speeds = self.shape, self.config.parallel, self.speeds
        moe = shape.moe
        assert moe is not None, "a layer of experts"
        tokens = micro.tokens / layout.context / layout.tensor
        copies = tokens * moe.top_k * self.workload.expert_imbalance
        flops = copies * 6 * shape.hidden_size * moe.ffn_hidden_size
        router = 2 * tokens * shape.hidden_size * moe.num_experts
        inner = 3 * moe.ffn_hidden_size * self._item_bytes
        moved = tokens * 5 * self._hidden_bytes + copies * (6 * self._hidden_bytes + inner)
        size = layout.expert * layout.expert_tensor_size
        near = min(size, self.device.gpus_per_node)
        sent = 2 * copies * self._hidden_bytes * layout.expert_tensor_size
        all_to_all_s = 0.0
        if size > 1:
            all_to_all_s = self._link_s(sent * (near - 1) / size, near=True)
        if size > near:
            all_to_all_s += self._link_s(sent * (size - near) / size, near=False)
        return PassTime(
            matmul=flops / (speeds.peak_flops * speeds.grouped)
            + router / (speeds.peak_flops * speeds.matmul),
            elementwise=moved / (speeds.memory * speeds.elementwise),
            all_to_all=all_to_all_s,
        )

    def _with_launches(self, parts: PassTime, layer: int, passes: int) -> PassTime:
        kernels = _EXPERT_KERNELS if self.shape.is_moe_layer(layer) else _DENSE_KERNELS
        launched_s = passes * kernels * self.speeds.launch_s
        overlap_s = parts.total if self.speeds.launches_overlap else 0.0
        return parts + PassTime(launches=max(0.0, launched_s - overlap_s))

    def _optimizer_s(self) -> float:
        """Return the seconds of an optimizer step on the rank with the most weights."""
        layout, speeds, item = self.config.parallel, self.speeds, self._item_bytes
        frozen = self.config.model.freeze_vision or self.config.model.lora.rank > 0
        states = [
            estimate_model_state(
                self.shape, layout, stage,
                item_bytes=item, freeze_vision=frozen, lora=self.config.model.lora,
            )
            for stage in {0, layout.pipeline - 1}
        ]  # fmt: skip
        state = max(states, key=lambda one: one.gradients)
        updated = state.optimizer / (8 if item == 4 else 12)
        replicas = layout.data * layout.context
        exchanged = 0.0
        if replicas > 1:  # float32 gradients are scattered, weights gathered
            num_bytes = state.gradients * (1 + item / 4) * (replicas - 1) / replicas
            near = layout.world_size <= self.device.gpus_per_node
            exchanged = self._link_s(num_bytes, near=near)
        return updated * _OPTIMIZER_BYTES / (speeds.memory * speeds.elementwise) + exchanged

    def _tensor_s(self, tokens: float) -> float:
        """Return the seconds in which tensor ranks gather and scatter hidden states once."""
        tensor = self.config.parallel.tensor
        if tensor == 1:
            return 0.0
        num_bytes = tokens * self._hidden_bytes * (tensor - 1) / tensor
        return 2 * self._link_s(num_bytes, near=tensor <= self.device.gpus_per_node)

    def _link_s(self, num_bytes: float, *, near: bool) -> float:
        links = self.speeds.links
        speed = links.same_node if near else links.network
        return num_bytes / (speed * self.speeds.collectives) + self.speeds.collective_s

    @property
    def _item_bytes(self) -> int:
        return self.device.item_bytes(self.config.model.dtype)

    @property
    def _hidden_bytes(self) -> int:
        return self.shape.hidden_size * self._item_bytes

    @property
    def _sequence_size(self) -> int:
        layout = self.config.parallel
        return layout.tensor if layout.sequence_parallel else 1
