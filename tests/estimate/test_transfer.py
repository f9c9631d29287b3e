"""The planned update: what arrives, over which links, against a plan from every rank's layout."""

from __future__ import annotations

from math import prod

import pytest

from mega_agentrl.config.policy_schema import ParallelConfig
from mega_agentrl.estimate.device import Device
from mega_agentrl.estimate.engine_layout import engine_layout
from mega_agentrl.estimate.transfer import locations, trainer_cut, transfer
from mega_agentrl.reshard.links import LinkSpeeds, Location
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.reshard.place import Place
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.traffic import count_traffic
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
    got = transfer(config, shape, Device(per_node=4))
    ranks = [Place(tensor_rank=rank % 2, tensor_size=2) for rank in range(4)]
    sources = [megatron_layout(shape, place) for place in ranks]
    sinks = [engine_layout(shape, rank % 2, 2) for rank in range(4)]
    places = [Location(rank // 4, rank % 4) for rank in range(8)]
    plan = plan_delivery(sources, sinks, places, "bfloat16", names=list(hf_shapes(shape)))
    traffic = count_traffic(plan, places)
    assert got.bytes_per_worker == max(traffic.received_by(rank) for rank in plan.sinks)
    assert got.total == {str(link): traffic.total(link) for link in traffic.sent}
    assert got.seconds == pytest.approx(traffic.seconds)


def test_every_engine_rank_gets_its_own_shards_once():
    shape = released("qwen3-235b-a22b", num_hidden_layers=2)
    config = configured(tensor=4, data=4, expert=16, engine=8, engines=2)
    got = transfer(config, shape, Device())
    whole = 2 * sum(map(prod, hf_shapes(shape).values()))
    replicated = 2 * 2 * (2 * 4096 + 128 * 4096 + 2 * 128 + 2 * 128 * 4096)
    assert whole / 8 < got.bytes_per_worker < whole / 8 + replicated
    # Both engines have machines of their own.
    assert got.total["network"] == got.least_network_bytes
    assert got.total["network"] > whole
    assert got.floor_s == got.bytes_per_worker / 50e9


def test_a_slower_network_takes_longer():
    shape = released("qwen3-4b")
    config = configured(tensor=2, data=4, engines=8)
    fast, slow = (
        transfer(config, shape, Device(), LinkSpeeds(network=speed)) for speed in (50e9, 5e9)
    )
    assert slow.seconds > 2 * fast.seconds
    assert slow.seconds >= slow.least_network_bytes / (8 * 5e9), "eight ports into one machine"
    assert slow.bytes_per_worker == fast.bytes_per_worker


def test_replicas_count_as_data_ranks_and_expert_tensor_ranks_as_expert_ranks():
    config = configured()
    config.parallel = ParallelConfig(
        tensor=2, context=2, data=2, pipeline=2, expert=2, expert_tensor=2
    )
    cut = trainer_cut(config, released("qwen3-30b-a3b"))
    assert (cut.tensor, cut.pipeline, cut.data, cut.expert) == (2, 2, 4, 4)
    assert trainer_cut(config, released("qwen3-32b")).expert == 1


def test_engines_stand_whole_in_one_machine():
    places = locations(6, 4, 2, 8)
    assert [place.node for place in places] == [0] * 6 + [1] * 4 + [1] * 4
    assert [place.device for place in places[6:]] == [*range(8)]
    assert [place.node for place in locations(4, 2, 2, 8)] == [0] * 8


def test_engines_that_share_gpus_are_where_the_policy_is():
    places = locations(8, 2, 3, 4, shared=True)
    assert places[8:] == places[:6]
    assert places[13] == Location(1, 1)
