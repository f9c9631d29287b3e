"""The planned update: what arrives, over which links, against a plan from every rank's layout."""

from __future__ import annotations

from math import prod

import pytest

from mega_agentrl.config.sections.policy import LoraConfig, ParallelConfig
from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts
from mega_agentrl.estimate.weight_transfer import (
    estimate_transfer,
    plan_rank_locations,
    trainer_parallel_sizes,
)
from mega_agentrl.reshard.mapping.lora_layout import lora_shapes
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation
from tests.estimate.configs import configured
from tests.estimate.shapes import released

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 256,
}


def test_a_small_plan_is_the_one_from_all_layouts():
    shape = released("qwen3-32b", **SMALL)
    config = configured(tensor=2, data=2, engine=2, engines=2)
    got = estimate_transfer(config, shape, DeviceSpec(gpus_per_node=4))
    ranks = [ModelParallelRank(tensor_rank=rank % 2, tensor_size=2) for rank in range(4)]
    sources = [megatron_layout(shape, place) for place in ranks]
    sinks = [engine_shard_layouts(shape, rank % 2, 2) for rank in range(4)]
    places = [RankLocation(rank // 4, rank % 4) for rank in range(8)]
    plan = plan_transfer(sources, sinks, places, "bfloat16", names=list(hf_shapes(shape)))
    traffic = count_traffic(plan, places)
    received = max(traffic.received_bytes_of(rank) for rank in plan.rollout_ranks)
    assert got.max_bytes_per_engine_rank == received
    links = {str(link): traffic.total_bytes(link) for link in traffic.sent_bytes}
    assert got.bytes_by_link == links
    assert got.predicted_s == pytest.approx(traffic.predicted_s)


def test_every_engine_rank_receives_its_shards_once():
    shape = released("qwen3-235b-a22b", num_hidden_layers=2)
    config = configured(tensor=4, data=4, expert=16, engine=8, engines=2)
    got = estimate_transfer(config, shape, DeviceSpec())
    whole = 2 * sum(map(prod, hf_shapes(shape).values()))
    replicated = 2 * 2 * (2 * 4096 + 128 * 4096 + 2 * 128 + 2 * 128 * 4096)
    assert whole / 8 < got.max_bytes_per_engine_rank < whole / 8 + replicated
    # Both engines have machines of their own.
    assert got.bytes_by_link["network"] == got.min_network_bytes
    assert got.bytes_by_link["network"] > whole
    assert got.lower_bound_s == got.max_bytes_per_engine_rank / 50e9


def test_a_slower_network_takes_longer():
    shape = released("qwen3-4b")
    config = configured(tensor=2, data=4, engines=8)
    fast, slow = (
        estimate_transfer(config, shape, DeviceSpec(), LinkSpeeds(network=speed))
        for speed in (50e9, 5e9)
    )
    assert slow.predicted_s > 2 * fast.predicted_s
    assert slow.predicted_s >= slow.min_network_bytes / (8 * 5e9), "eight ports into one machine"
    assert slow.max_bytes_per_engine_rank == fast.max_bytes_per_engine_rank


def test_replicas_count_as_data_ranks_and_expert_tensor_ranks_as_expert_ranks():
    config = configured()
    config.parallel = ParallelConfig(
        tensor=2, context=2, data=2, pipeline=2, expert=2, expert_tensor=2
    )
    cut = trainer_parallel_sizes(config, released("qwen3-30b-a3b"))
    assert (cut.tensor_size, cut.pipeline_size, cut.data_size, cut.expert_size) == (2, 2, 4, 4)
    assert trainer_parallel_sizes(config, released("qwen3-32b")).expert_size == 1


def test_an_engine_is_placed_on_one_machine():
    places = plan_rank_locations(6, 4, 2, 8)
    assert [place.node for place in places] == [0] * 6 + [1] * 4 + [1] * 4
    assert [place.device for place in places[6:]] == [*range(8)]
    assert [place.node for place in plan_rank_locations(4, 2, 2, 8)] == [0] * 8


def test_colocated_engines_are_placed_with_the_policy():
    places = plan_rank_locations(8, 2, 3, 4, colocated=True)
    assert places[8:] == places[:6]
    assert places[13] == RankLocation(1, 1)


def test_adapters_that_engines_merge_are_counted_apart():
    shape = released("qwen3-32b", **SMALL)
    config = configured(tensor=2, data=2, engine=1, engines=2)
    config.model.lora = LoraConfig(rank=2)
    shapes = lora_shapes(hf_shapes(shape), 2, config.model.lora.targets)
    got = estimate_transfer(config, shape, DeviceSpec())
    assert got.adapter_bytes_per_engine_rank == 2 * sum(map(prod, shapes.values()))
    config.cluster.colocated = True
    assert estimate_transfer(config, shape, DeviceSpec()).adapter_bytes_per_engine_rank == 0
