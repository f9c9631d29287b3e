"""The weight update that a configuration will run: bytes by link, predicted seconds.

The plan is the one the run would make (`reshard.plan`), from layouts that are worked out instead
of asked for: trainer ranks by the actors' name mapping, engine ranks by `engine_layout`. A model
of hundreds of billions on hundreds of ranks takes seconds.

    floor   the bytes of one engine rank's shards over one link of the network

Simplified where it changes no byte count: context ranks count as data ranks, expert-tensor
ranks as expert ranks, virtual stages as one run of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.estimate.engine_layout import engine_layout
from mega_agentrl.estimate.engine_memory import num_weights
from mega_agentrl.reshard.delivery import ITEM_BYTES
from mega_agentrl.reshard.links import Link, LinkSpeeds, Location
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import plan_owned
from mega_agentrl.reshard.regions import RankSets
from mega_agentrl.reshard.repetition import (
    TrainerCut,
    repeated_sinks,
    repeated_sources,
    sample_shape,
)
from mega_agentrl.reshard.traffic import count_traffic

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.reshard.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """bytes_per_worker: of the largest engine rank's shards. total: bytes by class of link.
    seconds: predicted, links only. floor_s: bytes_per_worker over one link of the network.
    """

    bytes_per_worker: int
    total: dict[str, int]
    least_network_bytes: int
    num_buckets: int
    seconds: float
    floor_s: float


def transfer(
    config: TrainConfig, shape: ModelShape, device: Device, speeds: LinkSpeeds | None = None
) -> Transfer:
    """Plan and count a full update to all engines. speeds: those of H100 nodes by default."""
    speeds = speeds or LinkSpeeds()
    cut = trainer_cut(config, shape)
    tensor, engines = config.engine.tensor, config.cluster.num_engines
    dtype = "bfloat16" if device.is_gpu else "float32"
    places = locations(
        cut.num_ranks, tensor, engines, device.per_node, shared=config.cluster.colocated
    )
    sample, sets = sample_shape(shape), RankSets()
    held = repeated_sources(shape, cut, sets)
    engine = [engine_layout(sample, rank, tensor) for rank in range(tensor)]
    wanted = repeated_sinks(shape, engine, engines, sets, first_rank=cut.num_ranks)
    plan = plan_owned(
        held, wanted, sets, places, dtype,
        names=list(hf_shapes(shape)), num_sources=cut.num_ranks,
        bucket_bytes=config.weights.bucket_mib * 2**20, speeds=speeds,
    )  # fmt: skip
    traffic = count_traffic(plan, places, speeds)
    own = max(traffic.received_by(rank) for rank in plan.sinks)
    assert own <= num_weights(shape, tensor) * ITEM_BYTES[dtype], "more than an engine rank holds"
    return Transfer(
        bytes_per_worker=own,
        total={str(link): traffic.total(link) for link in Link},
        least_network_bytes=traffic.least_network_bytes,
        num_buckets=len(plan.buckets),
        seconds=traffic.seconds,
        floor_s=own / speeds.network,
    )


def trainer_cut(config: TrainConfig, shape: ModelShape) -> TrainerCut:
    """The policy's layout in the planner's four sizes."""
    layout = config.parallel
    expert = layout.expert * layout.expert_tensor_size if shape.moe else 1
    if shape.moe and shape.moe.num_experts % expert:
        expert = layout.expert
    return TrainerCut(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data * layout.context,
        expert=expert,
    )


def locations(
    num_policy: int, tensor: int, engines: int, per_node: int, *, shared: bool = False
) -> list[Location]:
    """Policy ranks first, then engines, each engine inside one machine where it fits.

    shared: the engines are on the GPUs of the first policy ranks, in their order.
    """
    places = [Location(rank // per_node, rank % per_node) for rank in range(num_policy)]
    if shared:
        return places + places[: tensor * engines]
    seat = num_policy
    for _ in range(engines):
        if tensor <= per_node and seat % per_node + tensor > per_node:
            seat = -(-seat // per_node) * per_node
        places += [Location((seat + n) // per_node, (seat + n) % per_node) for n in range(tensor)]
        seat += tensor
    return places
