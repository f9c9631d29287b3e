"""Predicts the seconds of a rollout: continuous batching of an engine, with tools and the tail.

A step of an engine with n requests reads the weights and the requests' keys and values, which
bounds it at small n, and computes n tokens, which bounds it at large n:

    step = max(bytes / memory, FLOPs / peak) + collectives + the host's part

Of a mixture of experts the weights of those experts are read to which a token goes: with E experts,
k of them for a token, each one with a probability of 1 - (1 - k / E)^n.

All trajectories of a step start at once; as many decode as fit the KV cache and
`engine.max_num_seqs`, the next starts when one ends. Between two turns a trajectory waits for its
tool, and its place is free. All trajectories of an engine advance at the same rate, so that a heap
of the ends is all there is to simulate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.estimate.flops import ForwardFlops, forward_flops
from mega_agentrl.estimate.memory.engine import estimate_engine_memory, num_engine_rank_parameters

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.duration.speeds import DeviceSpeeds
    from mega_agentrl.estimate.duration.workload import Workload
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_MAX_SIMULATED = 256
"""Trajectories of an engine that are simulated; with more, each stands for several."""
_TAIL_FRACTION = 0.5
"""The tail is the time in which an engine decodes less than this part of its largest batch."""


_NUM_ITERATIONS, _TOLERANCE = 12, 0.005
"""Of the fixed point in which some requests decode and the others wait for tools."""


@lru_cache(maxsize=64)
def _flops_per_token(shape: ModelShape) -> ForwardFlops:
    return forward_flops(shape, [1], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTime:
    """The predicted rollout of a step."""

    total_s: float
    """Seconds from the first request to the end of the last trajectory."""
    prefill_s: float
    """Of these, seconds in which an engine reads prompts and answers of tools."""
    tail_s: float
    """Of these, seconds at the end with less than half of the largest batch."""
    wait_s: float
    """Of these, seconds in which an engine has no request, because all wait for tools."""
    without_tail_s: float
    """Seconds for as many tokens at the rate before the tail, as if rollouts had no gaps."""
    batch: float
    """Largest number of requests that decode at once in an engine."""
    tokens_per_s: float
    """Sampled tokens a second of all engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Predicts the seconds of an engine's steps, and how many requests decode at once."""

    config: TrainConfig
    shape: ModelShape
    device: DeviceSpec
    speeds: DeviceSpeeds

    def step_s(self, requests: float, context: float) -> float:
        """Return the seconds of a step that decodes one token for each of some requests.

        Args:
            requests: Number of requests.
            context: Mean number of tokens in a request's KV cache.
        """
        speeds, tensor = self.speeds, self.config.engine.tensor_parallel_size
        kv_heads = max(1, self.shape.num_kv_heads // tensor)
        kv_bytes = 2 * self.shape.num_layers * kv_heads * self.shape.head_dim * self._item_bytes
        num_bytes = self._weight_bytes(requests) + requests * context * kv_bytes
        flops = _flops_per_token(self.shape)
        per_token = (flops.linears + flops.output_layer) / tensor
        scores = flops.attention_scores * context / tensor
        compute_s = requests * per_token / (speeds.peak_flops * speeds.matmul)
        compute_s += requests * scores / (speeds.peak_flops * speeds.attention)
        device_s = max(num_bytes / (speeds.memory * speeds.decode), compute_s)
        host_s = speeds.engine_step_s + requests * speeds.engine_request_s
        return device_s + host_s + self._collective_s(requests, calls=1)

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds in which the engine reads tokens of prompts or tools' answers."""
        speeds, tensor = self.speeds, self.config.engine.tensor_parallel_size
        flops = tokens * _flops_per_token(self.shape).linears / tensor
        return flops / (speeds.peak_flops * speeds.matmul) + self._collective_s(tokens, calls=0)

    def max_requests(self, workload: Workload) -> float:
        """Return the number of requests that decode at once at most.

        A running request has half of its response in the cache, on average weighted by lengths; the
        trajectories of a prompt share it.
        """
        memory = estimate_engine_memory(self.config, self.shape, self.device)
        half = workload.mean_square / workload.response_tokens / 2
        tokens = half + workload.prompt_tokens / workload.group_size
        fitting = memory.num_kv_cache_tokens / max(1.0, tokens)
        return max(1.0, min(float(self.config.engine.max_num_seqs), fitting))

    @property
    def _item_bytes(self) -> int:
        return self.device.item_bytes(self.config.model.dtype)

    def _weight_bytes(self, requests: float) -> float:
        """Return the bytes of the weights that a step reads on a tensor rank."""
        shape, tensor = self.shape, self.config.engine.tensor_parallel_size
        num_weights = float(num_engine_rank_parameters(shape, tensor))
        num_weights -= shape.vocab_size * shape.hidden_size / tensor  # the embedding is looked up
        if (moe := shape.moe) is not None:
            expert = 3 * shape.hidden_size * moe.ffn_hidden_size / tensor
            unused = (1 - moe.top_k / moe.num_experts) ** requests
            num_weights -= sum(moe.moe_layer_pattern) * moe.num_experts * expert * unused
        return num_weights * self._item_bytes

    def _collective_s(self, tokens: float, *, calls: int) -> float:
        """Return the seconds of the two all-reduces of each layer over `tokens` tokens."""
        tensor, links = self.config.engine.tensor_parallel_size, self.speeds.links
        if tensor == 1:
            return 0.0
        speed = links.same_node if tensor <= self.device.gpus_per_node else links.network
        num_bytes = 2 * tokens * self.shape.hidden_size * self._item_bytes * (tensor - 1) / tensor
        latency_s = calls * self.speeds.collective_s / 2
        per_reduce_s = num_bytes / (speed * self.speeds.collectives) + latency_s
        return 2 * self.shape.num_layers * per_reduce_s


def predict_rollout(engine: EngineModel, workload: Workload) -> RolloutTime:
    """Predict the rollout of a step whose trajectories are spread over all engines evenly."""
    num_engines = engine.config.cluster.num_engines
    per_engine = workload.num_trajectories / num_engines
    number = max(1, min(ceil(per_engine), _MAX_SIMULATED))
    weight = per_engine / number
    context = workload.prompt_tokens + workload.mean_square / workload.response_tokens / 2
    waits_s = workload.num_calls * workload.call_s
    waits_s += (workload.num_calls + 1) * engine.speeds.request_s
    sampled = max(1.0, workload.sampled_tokens - workload.shared_tokens)
    wait_per_token_s = waits_s / sampled
    limit = engine.max_requests(workload)
    prefill_s = engine.prefill_s(_prefill_tokens(workload))

    def rate(running: float) -> tuple[float, float]:
        """Return seconds a token of a trajectory, and the requests that decode at once."""
        decoding = min(running, limit)
        step_s = engine.step_s(max(decoding, 1.0), context)
        for _ in range(_NUM_ITERATIONS):
            # What waits for tools does not decode.
            change = min(limit, running * step_s / (step_s + wait_per_token_s)) - decoding
            if abs(change) < _TOLERANCE * decoding:
                break
            decoding += change / 2
            step_s = engine.step_s(max(decoding, 1.0), context)
        return step_s + wait_per_token_s, decoding

    full_s = engine.step_s(limit, context)
    in_flight = max(1, int(limit * (full_s + wait_per_token_s) / full_s / weight))
    queue = [length * sampled for length in workload.relative_lengths(number)]
    ends = queue[:in_flight]
    heapq.heapify(ends)
    _, largest = rate(len(ends) * weight)
    started, now, position_s, tail_s, wait_s, steady_s = len(ends), 0.0, 0.0, 0.0, 0.0, 0.0
    cached: dict[int, tuple[float, float]] = {}
    steady_tokens = 0.0
    while ends:
        running = len(ends)
        if running not in cached:
            cached[running] = rate(running * weight)
        per_token_s, decoding = cached[running]
        end = heapq.heappop(ends)
        passed_s = (end - position_s) * per_token_s
        if decoding < _TAIL_FRACTION * largest:
            tail_s += passed_s
        else:
            steady_s += passed_s
            steady_tokens += (end - position_s) * running * weight
        wait_s += passed_s * max(0.0, 1 - decoding)
        now, position_s = now + passed_s, end
        if started < number:
            heapq.heappush(ends, position_s + queue[started])
            started += 1
    prefills_s = prefill_s * per_engine
    tokens = sampled * per_engine
    return RolloutTime(
        total_s=now + prefills_s,
        prefill_s=prefills_s,
        tail_s=tail_s,
        wait_s=wait_s,
        without_tail_s=tokens * steady_s / max(steady_tokens, 1.0) + prefills_s,
        batch=largest,
        tokens_per_s=tokens * num_engines / (now + prefills_s),
    )


def _prefill_tokens(workload: Workload) -> float:
    """Return the tokens that a trajectory makes an engine read; its prompt is shared."""
    tools = workload.response_tokens - workload.sampled_tokens
    return workload.prompt_tokens / workload.group_size + tools
