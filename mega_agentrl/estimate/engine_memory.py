"""Memory of an engine's rank, and how many tokens its KV cache holds.

vLLM takes `engine.memory_fraction` of a GPU: weights, what a pass needs at most (it runs one to
find out) and its runtime come off, the rest is KV cache. Beside that share lie what it does not
see when it measures: CUDA graphs, the entropy tap's copies of the logits, buckets of the weight
transfer with one module's parameters (a module is filled and then moved).

On GPUs that it shares with the policy (`cluster.colocated`) it finds there what the policy leaves
behind while the engine is awake, and leaves something itself while it sleeps (`asleep`).

    KV bytes per token   2 * layers * key heads of the rank * head width * bytes of a number
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.estimate.device import CPU_KERNEL_BYTES, CPU_LIBRARIES_BYTES, GIB
from mega_agentrl.estimate.engine_layout import engine_layout, num_elements
from mega_agentrl.reshard.repetition import kinds, sample_shape

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.reshard.model_shape import ModelShape

_FLOAT_BYTES = 4
_MIB = 2**20
_GRAPH_BYTES = GIB
MIN_BATCHED_TOKENS = 8192
"""Tokens of a pass at least, as `generator.engine` asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one tensor rank.

    activations: of the largest pass. logits: of all requests, with the sampler's copies. cache:
    of the KV cache. outside: beside vLLM's share. cache_tokens: that the KV cache holds. neighbour:
    what the policy leaves on a GPU that both share. buckets: of `transfer`, those that stay.
    """

    weights: int
    activations: int
    logits: int
    runtime: int
    cache: int
    tap: int
    transfer: int
    graphs: int
    token_bytes: int
    share: float
    neighbour: int
    buckets: int

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 where nothing is left for it."""
        return max(0, self.cache) // self.token_bytes

    @property
    def outside(self) -> int:
        """Beside vLLM's share."""
        return self.tap + self.transfer + self.graphs

    @property
    def asleep(self) -> int:
        """What it leaves on the GPU while the policy learns there."""
        return self.runtime + self.graphs + self.buckets

    @property
    def loading(self) -> int:
        """While it gets weights, still without its KV cache."""
        return self.weights + self.transfer + self.runtime + self.graphs

    @property
    def peak(self) -> int:
        """All of it, vLLM's share in full."""
        return round(self.share) + self.outside + self.neighbour


def engine_memory(config: TrainConfig, shape: ModelShape, device: Device) -> EngineMemory:
    """Of every rank alike."""
    engine, item = config.engine, device.engine_item_bytes
    weights = num_weights(shape, engine.tensor) * item
    activations = _activations(config, shape) * item
    rows = engine.max_concurrent * shape.vocab
    logits = rows * (item + 2 * _FLOAT_BYTES)
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        logits += rows * (_FLOAT_BYTES + 8)  # sorted values and their places
    bucket = config.weights.bucket_mib * _MIB
    runtime = device.engine_runtime_bytes
    if not device.is_gpu:
        # Models so small that a bucket holds no more than the rank receives.
        bucket = min(bucket, weights)
        runtime = CPU_LIBRARIES_BYTES + CPU_KERNEL_BYTES
    taken = weights + activations + logits + runtime
    if device.gib is None:
        share = float(engine.kv_cache_gib * GIB + taken)
    else:
        share = engine.memory_fraction * device.gib * GIB
    kv_heads = max(1, shape.num_kv_heads // engine.tensor)
    buckets = 2 * bucket
    shared = config.cluster.colocated and device.is_gpu
    return EngineMemory(
        weights=weights,
        activations=activations,
        logits=logits,
        runtime=runtime,
        cache=round(share) - taken,
        tap=3 * rows * _FLOAT_BYTES,
        transfer=buckets + _largest_layer(shape, engine.tensor) * item,
        graphs=_GRAPH_BYTES if device.is_gpu and not engine.eager else 0,
        token_bytes=2 * shape.num_layers * kv_heads * shape.head_dim * item,
        share=share,
        neighbour=device.policy_runtime_bytes + buckets if shared else 0,
        buckets=buckets,
    )


@lru_cache(maxsize=64)
def num_weights(shape: ModelShape, tensor_size: int) -> int:
    """Elements on one tensor rank, padding of the vocabulary included."""
    sample = sample_shape(shape)
    total = num_elements(engine_layout(sample, 0, tensor_size))
    for index, layer in enumerate(kinds(shape)):
        alike = sum(shape.is_sparse(n) is shape.is_sparse(layer) for n in range(shape.num_layers))
        total += (alike - 1) * _layer_elements(sample, tensor_size, index)
    return total


def _layer_elements(sample: ModelShape, tensor_size: int, layer: int) -> int:
    prefix = f"model.layers.{layer}."
    shards = engine_layout(sample, 0, tensor_size)
    return num_elements([shard for shard in shards if shard.name.startswith(prefix)])


@lru_cache(maxsize=64)
def _largest_layer(shape: ModelShape, tensor_size: int) -> int:
    sample = sample_shape(shape)
    return max(_layer_elements(sample, tensor_size, n) for n in range(sample.num_layers))


def _activations(config: TrainConfig, shape: ModelShape) -> int:
    """Elements of the largest pass: residual, two hidden states, the widest inner products."""
    tensor = config.engine.tensor
    tokens = max(MIN_BATCHED_TOKENS, config.engine.max_model_len)
    inner = 3 * shape.ffn // tensor
    if shape.moe is not None:
        copies = shape.moe.top_k
        sparse = copies * (3 * shape.moe.ffn // tensor + shape.hidden)
        inner = sparse if all(shape.moe.sparse) else max(inner, sparse)
    kv_heads = max(1, shape.num_kv_heads // tensor)
    attention = 2 * (shape.num_heads // tensor + kv_heads) * shape.head_dim
    return tokens * (3 * shape.hidden + max(inner, attention))
