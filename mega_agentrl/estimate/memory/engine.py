"""Estimates the memory of an engine rank and the number of tokens that its KV cache holds.

vLLM takes the fraction `engine.gpu_memory_utilization` of a GPU for weights, the largest forward
pass and the CUDA graphs, both of which it profiles, and the runtime; the KV cache gets the rest.
vLLM's profiling misses the buckets of the weight transfer, and the open modules of an update, those
whose weights have arrived in part. This memory is outside the fraction; on a CPU so are the entropy
tap's copies of the logits (`generator.entropy_tap`), which has none on a GPU. Weights arrive layer
by layer (`planner.transfer_groups`), so that the open modules are at most the largest layer, a
larger tensor outside of the layers, or the contents of one bucket.

With `cluster.colocated` the policy keeps some memory allocated while the engine is awake, and the
engine keeps some while it sleeps (`sleeping_bytes`).

    KV bytes per token   2 * layers * key heads of the rank * head width * bytes of an element

An engine of a vision-language model also caches the features of as many image tokens as a step may
have. vLLM reserves them, and profiles the tower with as many patches; the larger of its pass and
the decoder's counts. A request's patches, which stay on the host, are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.estimate.device import CPU_KERNEL_BYTES, CPU_LIBRARIES_BYTES, GIB, MIB
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts, num_elements
from mega_agentrl.reshard.planner.owner_expansion import (
    first_layer_of_each_type,
    one_layer_per_type,
)
from mega_agentrl.reshard.planner.transfer_groups import transfer_unit

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_FLOAT_BYTES = 4
_EXACT_BYTES = 8
"""Bytes of an element of `numerics.exact_sums.FixedPointRows`."""
_CUDA_GRAPH_BYTES = GIB
"""Assumed bytes of the CUDA graphs of an engine rank."""
MIN_BATCHED_TOKENS = 8192
"""Minimum number of tokens per forward pass, which `generator.engine_args` requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one tensor rank of an engine."""

    weights: int
    """Bytes of the weights; with `model.zero_mismatch` also of their float64 copies."""
    activations: int
    """Bytes of the activations of the largest forward pass."""
    logits: int
    """Bytes of the logits of all requests, the sampler's copies included."""
    runtime: int
    """Bytes of the CUDA context and libraries."""
    encoder_cache: int
    """Bytes of the cached features of images; 0 for a text model."""
    kv_cache: int
    """Bytes of the KV cache; negative if the rest of vLLM's share does not fit."""
    entropy_tap: int
    """Bytes of the entropy tap's copies of the logits, on a CPU."""
    transfer: int
    """Bytes of the weight transfer: two buckets and the open modules."""
    cuda_graphs: int
    """Bytes of the CUDA graphs."""
    kv_bytes_per_token: int
    """Bytes of the KV cache per token."""
    vllm_share: float
    """Bytes that vLLM takes according to `engine.gpu_memory_utilization`."""
    colocated_policy: int
    """Bytes that the policy leaves on a shared GPU; 0 on separate GPUs."""
    resident_buckets: int
    """Bytes of the transfer buckets, which stay allocated."""

    @property
    def num_kv_cache_tokens(self) -> int:
        """Number of tokens that the KV cache holds, 0 if there is no room for it."""
        return max(0, self.kv_cache) // self.kv_bytes_per_token

    @property
    def outside_vllm_bytes(self) -> int:
        """Bytes that vLLM's share does not include."""
        return self.entropy_tap + self.transfer

    @property
    def sleeping_bytes(self) -> int:
        """Bytes that stay on a shared GPU while the policy trains."""
        return self.runtime + self.cuda_graphs + self.resident_buckets

    @property
    def loading_bytes(self) -> int:
        """Bytes during the weight update, before the KV cache is allocated."""
        return self.weights + self.transfer + self.runtime + self.cuda_graphs

    @property
    def peak(self) -> int:
        """Peak bytes on the GPU, with all of vLLM's share."""
        return round(self.vllm_share) + self.outside_vllm_bytes + self.colocated_policy


def estimate_engine_memory(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec
) -> EngineMemory:
    """Return the memory of an engine rank; all ranks need the same."""
    engine, item_bytes = config.engine, device.item_bytes(config.model.dtype)
    num_weights = num_engine_rank_parameters(shape, engine.tensor_parallel_size)
    received_bytes = num_weights * item_bytes
    weights = received_bytes + (num_weights * _EXACT_BYTES if config.model.zero_mismatch else 0)
    activations = item_bytes * max(
        _num_activation_elements(config, shape), _num_tower_activation_elements(config, shape)
    )
    num_logits = engine.max_num_seqs * shape.vocab_size
    logits = num_logits * 3 * _FLOAT_BYTES
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        logits += num_logits * (_FLOAT_BYTES + 8)  # sorted values and their indices
    bucket = config.weight_sync.bucket_mib * MIB
    runtime = device.engine_runtime_bytes
    if not device.is_gpu:
        # Models on CPUs are small: a bucket holds no more than the rank receives.
        bucket = min(bucket, received_bytes)
        runtime = CPU_LIBRARIES_BYTES + CPU_KERNEL_BYTES
    encoder_cache = _num_cached_feature_elements(config, shape) * item_bytes
    cuda_graphs = _CUDA_GRAPH_BYTES if device.is_gpu and not engine.enforce_eager else 0
    used_bytes = weights + activations + logits + encoder_cache + runtime + cuda_graphs
    if device.memory_gib is None:
        share = float(engine.cpu_kv_cache_gib * GIB + used_bytes)
    else:
        share = engine.gpu_memory_utilization * device.memory_gib * GIB
    kv_heads = max(1, shape.num_kv_heads // engine.tensor_parallel_size)
    buckets = 2 * bucket
    open_modules = max(bucket, num_open_elements(shape, engine.tensor_parallel_size) * item_bytes)
    shares_gpu = config.cluster.colocated and device.is_gpu
    num_models = 1 + config.cluster.colocated_models * len(config.auxiliary_models)
    return EngineMemory(
        weights=weights,
        activations=activations,
        logits=logits,
        runtime=runtime,
        encoder_cache=encoder_cache,
        kv_cache=round(share) - used_bytes,
        entropy_tap=0 if device.is_gpu else 3 * num_logits * _FLOAT_BYTES,
        transfer=buckets + open_modules,
        cuda_graphs=cuda_graphs,
        kv_bytes_per_token=2 * shape.num_layers * kv_heads * shape.head_dim * item_bytes,
        vllm_share=share,
        colocated_policy=num_models * device.policy_runtime_bytes + buckets if shares_gpu else 0,
        resident_buckets=buckets,
    )


@lru_cache(maxsize=64)
def num_engine_rank_parameters(shape: ModelShape, tensor_size: int) -> int:
    """Return the number of weight elements on one tensor rank, vocabulary padding included."""
    sample = one_layer_per_type(shape)
    total = num_elements(engine_shard_layouts(sample, 0, tensor_size))
    for index, layer in enumerate(first_layer_of_each_type(shape)):
        num_layers = sum(
            shape.is_moe_layer(n) is shape.is_moe_layer(layer) for n in range(shape.num_layers)
        )
        total += (num_layers - 1) * _num_layer_elements(sample, tensor_size, index)
    return total


def _num_layer_elements(sample: ModelShape, tensor_size: int, layer: int) -> int:
    prefix = f"{sample.family.hf_decoder_prefix}layers.{layer}."
    shards = engine_shard_layouts(sample, 0, tensor_size)
    return num_elements([shard for shard in shards if shard.name.startswith(prefix)])


@lru_cache(maxsize=64)
def num_open_elements(shape: ModelShape, tensor_size: int) -> int:
    """Return the elements of the largest unit of an update on a tensor rank.

    A unit (`transfer_unit`) is a layer, or a tensor outside of the layers. Its modules are open
    until all of its weights have arrived.
    """
    shards_by_unit: dict[str, list[ShardLayout]] = defaultdict(list)
    for shard in engine_shard_layouts(one_layer_per_type(shape), 0, tensor_size):
        shards_by_unit[transfer_unit(shard.name)].append(shard)
    return max(map(num_elements, shards_by_unit.values()))


def _num_activation_elements(config: TrainConfig, shape: ModelShape) -> int:
    """Return the activation elements of the largest forward pass on a tensor rank.

    They are the residual, two hidden states and the inner products of attention, MLP or experts.
    """
    tensor, tokens = config.engine.tensor_parallel_size, _num_step_tokens(config)
    inner = 3 * shape.ffn_hidden_size // tensor
    if shape.moe is not None:
        num_copies = shape.moe.top_k
        sparse = num_copies * (3 * shape.moe.ffn_hidden_size // tensor + shape.hidden_size)
        inner = sparse if all(shape.moe.moe_layer_pattern) else max(inner, sparse)
    kv_heads = max(1, shape.num_kv_heads // tensor)
    attention = 2 * (shape.num_heads // tensor + kv_heads) * shape.head_dim
    return tokens * (3 * shape.hidden_size + max(inner, attention))


def _num_tower_activation_elements(config: TrainConfig, shape: ModelShape) -> int:
    """Return the elements of the tower's largest pass, as in the decoder, with its patches.

    vLLM splits the inner products among the tensor ranks.
    """
    vision, tensor = shape.vision, config.engine.tensor_parallel_size
    if vision is None:
        return 0
    num_patches = _num_step_tokens(config) * vision.merge_size**2
    inner = max(3 * vision.ffn_hidden_size, 4 * vision.hidden_size) // tensor
    return num_patches * (vision.patch_dim + 3 * vision.hidden_size + inner)


def _num_cached_feature_elements(config: TrainConfig, shape: ModelShape) -> int:
    """Return the elements of the features that vLLM caches, those for DeepStack included."""
    if shape.vision is None:
        return 0
    width = shape.vision.out_hidden_size * (1 + len(shape.vision.deepstack_blocks))
    return _num_step_tokens(config) * width


def _num_step_tokens(config: TrainConfig) -> int:
    """Return the maximum number of tokens per forward pass, or of image tokens in the cache."""
    return max(MIN_BATCHED_TOKENS, config.engine.max_model_len)
