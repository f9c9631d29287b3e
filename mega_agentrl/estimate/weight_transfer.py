"""Predicts the weight update of a configuration: bytes by link type, and seconds.

The plan is the one that the run would make (`reshard.planner`). The layouts of trainer ranks are
derived from the model mapping, those of engine ranks from `memory.engine_layout`. Planning a model
of hundreds of billions of parameters on hundreds of ranks takes seconds. Three simplifications
change no byte count: context ranks count as data ranks, expert-tensor ranks as expert ranks, and
the virtual pipeline stages of a rank as one run of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.memory.engine import num_engine_rank_parameters
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts
from mega_agentrl.reshard.layout import round_up
from mega_agentrl.reshard.mapping.lora_layout import lora_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.planner.owner_expansion import (
    TrainerParallelSizes,
    expand_rollout_owners,
    expand_trainer_owners,
    one_layer_per_type,
)
from mega_agentrl.reshard.planner.planner import group_owners, plan_from_groups
from mega_agentrl.reshard.planner.regions import RankSetCache
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.reshard.mapping.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEstimate:
    """The predicted traffic and time of one full weight update.

    With adapters that the engines merge, this is the first update; later ones send the adapters
    alone.
    """

    max_bytes_per_engine_rank: int
    """Bytes that the engine rank with the largest shards receives."""
    adapter_bytes_per_engine_rank: int
    """Bytes of the adapters that an engine rank receives in each update; 0 if it gets weights."""
    bytes_by_link: dict[str, int]
    """Total bytes by link type."""
    min_network_bytes: int
    """Minimum number of bytes that must cross the network."""
    num_buckets: int
    """Number of transfer buckets."""
    predicted_s: float
    """Predicted seconds on the links, without copies and latencies."""
    lower_bound_s: float
    """Seconds to send `max_bytes_per_engine_rank` over one network link."""


def estimate_transfer(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, speeds: LinkSpeeds | None = None
) -> TransferEstimate:
    """Plan one full weight update of all engines and return its traffic.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        speeds: Speeds of the links; None for those of H100 nodes.
    """
    speeds = speeds or LinkSpeeds()
    sizes = trainer_parallel_sizes(config, shape)
    tensor, engines = config.engine.tensor_parallel_size, config.cluster.num_engines
    dtype = str(config.model.dtype.resolve(on_gpu=device.is_gpu))
    locations = plan_rank_locations(
        sizes.num_ranks, tensor, engines, device.gpus_per_node, colocated=config.cluster.colocated
    )
    sample, rank_sets = one_layer_per_type(shape), RankSetCache()
    trainer_owners = expand_trainer_owners(shape, sizes, rank_sets)
    engine_layouts = [engine_shard_layouts(sample, rank, tensor) for rank in range(tensor)]
    rollout_owners = expand_rollout_owners(
        shape, engine_layouts, engines, rank_sets, first_rank=sizes.num_ranks
    )
    names = list(hf_shapes(shape))
    plan = plan_from_groups(
        group_owners(trainer_owners, rollout_owners, rank_sets, dtype, names=names),
        locations,
        dtype,
        names=names,
        num_trainer_ranks=sizes.num_ranks,
        bucket_bytes=config.weight_sync.bucket_mib * MIB,
    )
    traffic = count_traffic(plan, locations, speeds)
    max_received_bytes = max(traffic.received_bytes_of(rank) for rank in plan.rollout_ranks)
    assert max_received_bytes <= num_engine_rank_parameters(shape, tensor) * DTYPE_BYTES[dtype], (
        "an engine rank receives more than it holds"
    )
    return TransferEstimate(
        max_bytes_per_engine_rank=max_received_bytes,
        adapter_bytes_per_engine_rank=_adapter_bytes(config, shape, DTYPE_BYTES[dtype]),
        bytes_by_link={str(link): traffic.total_bytes(link) for link in LinkType},
        min_network_bytes=traffic.min_network_bytes,
        num_buckets=len(plan.buckets),
        predicted_s=traffic.predicted_s,
        lower_bound_s=max_received_bytes / speeds.network,
    )


def _adapter_bytes(config: TrainConfig, shape: ModelShape, item_bytes: int) -> int:
    lora = config.model.lora
    if not lora.rank or config.cluster.colocated:
        return 0
    layout = engine_shard_layouts(shape, 0, config.engine.tensor_parallel_size)
    adapters = lora_shards(layout, lora.rank, lora.targets)
    return item_bytes * sum(prod(adapter.shape) for adapter in adapters)


def trainer_parallel_sizes(config: TrainConfig, shape: ModelShape) -> TrainerParallelSizes:
    """Return the policy's parallel sizes with the simplifications of this module."""
    layout = config.parallel
    expert = layout.expert * layout.expert_tensor_size if shape.moe else 1
    if shape.moe and shape.moe.num_experts % expert:
        expert = layout.expert
    return TrainerParallelSizes(
        tensor_size=layout.tensor,
        pipeline_size=layout.pipeline,
        data_size=layout.data * layout.context,
        expert_size=expert,
    )


def plan_rank_locations(
    num_policy_ranks: int,
    tensor_size: int,
    num_engines: int,
    gpus_per_node: int,
    *,
    colocated: bool = False,
) -> list[RankLocation]:
    """Return the node and GPU of every rank: policy ranks first, then engine ranks.

    Each engine is placed on one node if it fits there.

    Args:
        num_policy_ranks: Number of policy ranks.
        tensor_size: Tensor-parallel size of an engine.
        num_engines: Number of engines.
        gpus_per_node: Number of GPUs per node.
        colocated: Whether the engines share the GPUs of the first policy ranks, in the same order.
    """
    locations = [
        RankLocation(rank // gpus_per_node, rank % gpus_per_node)
        for rank in range(num_policy_ranks)
    ]
    if colocated:
        return locations + locations[: tensor_size * num_engines]
    gpu = num_policy_ranks
    for _ in range(num_engines):
        if tensor_size <= gpus_per_node and gpu % gpus_per_node + tensor_size > gpus_per_node:
            gpu = round_up(gpu, gpus_per_node)
        locations += [
            RankLocation((gpu + n) // gpus_per_node, (gpu + n) % gpus_per_node)
            for n in range(tensor_size)
        ]
        gpu += tensor_size
    return locations
