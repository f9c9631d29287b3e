"""Who writes what, for every rank of a layout, without starting the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.actor import checkpoint_state
from mega_agentrl.actor.checkpoint_state import MOMENTS, WEIGHT, has_masters, key
from mega_agentrl.actor.flat_shards import hf_views
from mega_agentrl.actor.groups import Position, partition
from mega_agentrl.config.schema import ParallelConfig
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes, is_expert, megatron_layout
from tests.tiny_models import make_tiny_model

LAYOUTS = {
    "one": {},
    "TP2-PP2": {"tensor": 2, "pipeline": 2},
    "PP2-virtual-DP2": {"pipeline": 2, "virtual": 2, "data": 2},
    "TP2-DP2-CP2": {"tensor": 2, "data": 2, "context": 2},
    "EP2-TP2-DP2": {"tensor": 2, "data": 2, "expert": 2},
    "EP4": {"data": 4, "expert": 4},
}


class Group(SimpleNamespace):
    """Stands where a process group would."""

    def size(self):
        return len(self.ranks)

    def rank(self):
        return self.ranks.index(self.mine)


def group(layout, mine, key):
    (ranks,) = [ranks for ranks in partition(layout, key) if mine in ranks]
    return Group(ranks=ranks, mine=mine)


def network(shape, layout, rank):
    """As much of a rank's network as decides what it writes, values all 1."""
    place = Position.of(rank, layout).place
    shards = megatron_layout(shape, place)
    parameters = {shard.name: torch.nn.Parameter(torch.ones(shard.shape)) for shard in shards}
    dense = group(layout, rank, lambda at: (at.place.tensor_rank, at.place.pipeline_rank))
    expert = group(
        layout,
        rank,
        lambda at: (at.place.expert_tensor_rank, at.place.expert_rank, at.place.pipeline_rank),
    )
    tensor = group(layout, rank, lambda at: (at.context_rank, at.data_rank, at.place.pipeline_rank))

    def shares():
        for name, parameter in parameters.items():
            replicas = expert if is_expert(name) else dense
            index, size = replicas.rank(), replicas.size()
            if not layout.distributed_optimizer:
                index, size = 0, 1
            edges = [parameter.numel() * part // size for part in range(size + 1)]
            run = torch.ones(edges[index + 1] - edges[index])
            yield parameter, edges[index], dict.fromkeys(("param", *MOMENTS), run)

    return SimpleNamespace(
        shape=shape,
        layout=shards,
        parameters=parameters,
        dtype=torch.float32,
        trains=True,
        optimizer=SimpleNamespace(shares=shares),
        config=SimpleNamespace(parallel=layout),
        groups=SimpleNamespace(collection=SimpleNamespace(tp=tensor, dp_cp=dense, expt_dp=expert)),
    )


@pytest.fixture(scope="module", params=["qwen3_moe", "tied"])
def shape(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    name = "qwen3" if request.param == "tied" else request.param
    return ModelShape.from_folder(make_tiny_model(name, folder, tied=request.param == "tied"))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_together_write_every_element_once(name, distributed, shape):
    if "EP" in name and shape.moe is None:
        pytest.skip("no experts to cut")
    layout = ParallelConfig(**LAYOUTS[name], distributed_optimizer=distributed)
    written = {
        key(kind, hf): torch.zeros(full, dtype=torch.int64)
        for kind in (WEIGHT, *MOMENTS)
        for hf, full in hf_shapes(shape).items()
    }
    elements = []
    for rank in range(layout.num_ranks):
        one = network(shape, layout, rank)
        elements.append(0)
        for kind, number, shard, first, run in checkpoint_state._runs(one):
            own_share = kind != WEIGHT and distributed
            if not checkpoint_state._writes(one, number, shard, own_share=own_share):
                continue
            for hf, rect, view in hf_views(shard, run, first):
                written[key(kind, hf)][rect.slices] += 1
                elements[-1] += view.numel()
    assert written.keys() == checkpoint_state.stored_shapes(one).keys()
    for stored, counts in written.items():
        assert (counts == 1).all(), stored
    # Replicas share the work.
    assert max(elements) < 0.7 * sum(elements) or layout.num_ranks == 1


def test_masters_are_kept_for_everything_but_float32():
    assert has_masters(torch.bfloat16)
    assert not has_masters(torch.float32)


def test_padding_becomes_zero_and_the_source_of_float32_is_the_masters(shape, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    one = network(shape, ParallelConfig(tensor=2, sequence=True), 1)
    state = checkpoint_state.to_load(one, masters=True, num_ranks=2)
    embedding = one.parameters["embedding.word_embeddings.weight"]
    # Its rows 29..31 are padding, so it is emptied; what is read whole is left to the reading.
    assert (embedding == 0).all()
    assert (one.parameters["decoder.final_layernorm.weight"] == 1).all()
    random = state.pop("rng")
    assert (random.global_shape, random.global_offset) == ((2,), (1,))
    assert {entry.key.split(".")[0] for entry in state.values()} == {"master", *MOMENTS}
    plain = checkpoint_state.to_load(one, masters=False, num_ranks=2)
    plain.pop("rng")
    assert {entry.key.split(".")[0] for entry in plain.values()} == {WEIGHT, *MOMENTS}
