"""Plans for scaled-down clusters keep the bound of peers and stay near the time of own bytes."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation
from tests.reshard.model_cuts import make_moe_shape, trainer_layouts_of
from tests.reshard.rollout_cuts import engine_layouts

MAX_PEERS = 32
MAX_DELAY = 1.3
"""Predicted time over that of a rank's own bytes on one network link."""

WIDE = {"hidden_size": 64, "num_heads": 16, "head_dim": 8, "vocab_size": 128, "num_kv_heads": 2}
SHAPE = make_moe_shape(num_layers=16, num_experts=32, ffn_hidden_size=256, **WIDE)


@pytest.mark.parametrize(
    ("trainer", "engine", "engines", "per_node"),
    [
        # Every rank of an engine needs a part of each expert: 4 stages of 32 senders.
        pytest.param(
            *({"tensor": 4, "pipeline": 4, "data": 16, "expert": 32}, 8, 8, 2),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *({"tensor": 4, "pipeline": 4, "data": 8, "expert": 32}, 8, 8, 8),
            marks=pytest.mark.extended,
        ),
        ({"tensor": 4, "pipeline": 2, "data": 16, "expert": 32}, 4, 8, 4),
    ],
    ids=["engine-on-four-machines", "one-replica", "two-stages"],
)
def test_few_peers_and_no_rank_waits_long(trainer, engine, engines, per_node):
    trainer_layouts = trainer_layouts_of(SHAPE, **trainer)
    rollout_layouts = engine_layouts(SHAPE, engine) * engines
    num_ranks = len(trainer_layouts) + len(rollout_layouts)
    locations = [RankLocation(rank // per_node, rank) for rank in range(num_ranks)]
    names = list(hf_shapes(SHAPE))
    plan = plan_transfer(trainer_layouts, rollout_layouts, locations, "bfloat16", names=names)
    traffic = count_traffic(plan, locations)
    assert traffic.max_peers() <= MAX_PEERS
    assert traffic.total_bytes(LinkType.network) == plan.min_network_bytes
    own_bytes = max(traffic.received_bytes_of(rank) for rank in plan.rollout_ranks)
    assert traffic.predicted_s <= MAX_DELAY * own_bytes / LinkSpeeds().network
