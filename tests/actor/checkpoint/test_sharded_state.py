"""Which rank writes what, for every rank of a layout, without starting the ranks."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.checkpoint import sharded_state
from mega_agentrl.actor.checkpoint.sharded_state import (
    MOMENTS,
    WEIGHT,
    iter_hf_views,
    rects_of_flat_range,
    state_key,
)
from mega_agentrl.actor.parallel.process_groups import RankCoordinates, partition_ranks
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.model_mapping import (
    hf_shapes,
    is_expert_param,
    is_hf_vision_name,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import RowRange, stack_rows
from tests.tiny_models import make_tiny_model
from tests.vision_models import make_vision_model

LAYOUTS = {
    "one": {},
    "TP2-PP2": {"tensor": 2, "pipeline": 2},
    "PP2-virtual-DP2": {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
    "TP2-DP2-CP2": {"tensor": 2, "data": 2, "context": 2},
    "EP2-TP2-DP2": {"tensor": 2, "data": 2, "expert": 2},
    "EP4": {"data": 4, "expert": 4},
}


class Group(SimpleNamespace):
    """A stand-in for a process group."""

    def size(self):
        return len(self.ranks)

    def rank(self):
        return self.ranks.index(self.mine)


def group(layout, mine, *shared):
    (ranks,) = [ranks for ranks in partition_ranks(layout, shared) if mine in ranks]
    return Group(ranks=ranks, mine=mine)


def fake_model(shape, layout, rank):
    """The attributes of `MegatronModel` that decide what a rank writes; all values are 1."""
    mp_rank = RankCoordinates.from_rank(rank, layout).model_parallel_rank
    shards = megatron_layout(shape, mp_rank)
    parameters = {shard.name: torch.nn.Parameter(torch.ones(shard.shape)) for shard in shards}
    dense = group(layout, rank, "tensor", "pipeline")
    expert = group(layout, rank, "expert_tensor", "expert", "pipeline")
    tensor = group(layout, rank, "context", "data", "pipeline")

    def state_shards():
        for name, parameter in parameters.items():
            replicas = expert if is_expert_param(name) else dense
            index, size = replicas.rank(), replicas.size()
            if not layout.distributed_optimizer:
                index, size = 0, 1
            edges = [parameter.numel() * part // size for part in range(size + 1)]
            run = torch.ones(edges[index + 1] - edges[index])
            yield parameter, edges[index], dict.fromkeys(("param", *MOMENTS), run)

    return SimpleNamespace(
        shape=shape,
        state_layouts=shards,
        state_shapes=hf_shapes(shape),
        parameters=parameters,
        dtype=torch.float32,
        is_trainable=True,
        optimizer=SimpleNamespace(state_shards=state_shards),
        config=SimpleNamespace(parallel=layout, model=ModelConfig()),
        groups=SimpleNamespace(
            pg_collection=SimpleNamespace(tp=tensor, dp_cp=dense, expt_dp=expert)
        ),
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
        pytest.skip("no experts")
    layout = ParallelConfig(**LAYOUTS[name], distributed_optimizer=distributed)
    written = {
        state_key(kind, hf): torch.zeros(full, dtype=torch.int64)
        for kind in (WEIGHT, *MOMENTS)
        for hf, full in hf_shapes(shape).items()
    }
    elements = []
    for rank in range(layout.world_size):
        one = fake_model(shape, layout, rank)
        elements.append(0)
        for kind, shard, first, run in sharded_state._iter_flat_ranges(one):
            is_sharded = kind != WEIGHT and distributed
            if shard.name not in sharded_state._written_parameters(one, is_sharded):
                continue
            for hf, rect, view in iter_hf_views(shard, run, first):
                written[state_key(kind, hf)][rect.slices] += 1
                elements[-1] += view.numel()
    assert written.keys() == sharded_state.stored_shapes(one).keys()
    for stored, counts in written.items():
        assert (counts == 1).all(), stored
    # Replicas share the work.
    assert max(elements) < 0.7 * sum(elements) or layout.world_size == 1


def test_replicas_write_equal_shares_whatever_the_number_of_matrices_in_a_layer(tmp_path):
    """A layer has eight parameters: a choice by number gives one replica of four all the fc1."""
    deep = ModelShape.from_folder(make_tiny_model("qwen3", tmp_path, num_hidden_layers=8))
    ranks = [fake_model(deep, ParallelConfig(data=4), rank) for rank in range(4)]
    written = [sharded_state._written_parameters(one, is_sharded=False) for one in ranks]
    parameters = ranks[0].parameters
    assert sorted(name for names in written for name in names) == sorted(parameters)
    shares = [sum(parameters[name].numel() for name in names) for names in written]
    assert max(shares) < 0.28 * sum(shares)


def test_padding_is_zeroed_and_masters_are_read_if_asked_for(shape, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    one = fake_model(shape, ParallelConfig(tensor=2, sequence_parallel=True), 1)
    state = sharded_state.sharded_state_to_load(one, masters=True, num_ranks=2)
    embedding = one.parameters["embedding.word_embeddings.weight"]
    # Its rows 29..31 are padding, so it is emptied; what is read whole is left to the reading.
    assert (embedding == 0).all()
    assert (one.parameters["decoder.final_layernorm.weight"] == 1).all()
    random = state.pop("rng")
    assert (random.global_shape, random.global_offset) == ((2,), (1,))
    assert {entry.key.split(".")[0] for entry in state.values()} == {"master", *MOMENTS}
    plain = sharded_state.sharded_state_to_load(one, masters=False, num_ranks=2)
    plain.pop("rng")
    assert {entry.key.split(".")[0] for entry in plain.values()} == {WEIGHT, *MOMENTS}


def test_a_frozen_tower_has_no_masters_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    vision_shape = ModelShape.from_folder(make_vision_model("qwen2_5_vl", tmp_path))
    one = fake_model(vision_shape, ParallelConfig(), 0)
    state = sharded_state.sharded_state_to_load(one, masters=True, num_ranks=1, freeze_vision=True)
    state.pop("rng")
    keys = {entry.key for entry in state.values()}
    weights = {key.removeprefix("weight.") for key in keys if key.startswith("weight.")}
    masters = {key.removeprefix("master.") for key in keys if key.startswith("master.")}
    names = set(hf_shapes(vision_shape))
    assert weights == {name for name in names if is_hf_vision_name(vision_shape, name)}
    assert masters == names - weights


def test_a_range_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_one():
    # Elements 2..10 of a [3, 4] matrix: two of row 0, all of row 1, three of row 2.
    rects = list(rects_of_flat_range((3, 4), 2, 11))
    assert rects == [Rect((0, 2), (1, 4)), Rect((1, 0), (2, 4)), Rect((2, 0), (3, 3))]
    assert list(rects_of_flat_range((7,), 2, 5)) == [Rect((2,), (5,))]
    assert list(rects_of_flat_range((7,), 3, 3)) == []


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), ends=st.data())
def test_the_rects_of_a_range_hold_its_elements_in_order(shape, ends):
    flat = torch.arange(torch.Size(shape).numel())
    start = ends.draw(st.integers(0, len(flat)))
    stop = ends.draw(st.integers(start, len(flat)))
    rects = list(rects_of_flat_range(tuple(shape), start, stop))
    parts = [flat.view(shape)[rect.slices].flatten() for rect in rects]
    assert torch.equal(torch.cat([flat[:0], *parts]), flat[start:stop])


@given(cuts=st.lists(st.integers(0, 48), max_size=3))
def test_ranges_of_a_stacked_matrix_write_each_tensor_once(cuts):
    # 3 rows of `a` from its row 1 over 2 rows of `b`, and 3 rows of padding.
    shard = stack_rows("w", [RowRange("a", 1, 3), RowRange("b", 0, 2)], (6,), window=(0, 8))
    local = torch.arange(48.0)
    whole = {"a": torch.full((5, 6), -1.0), "b": torch.full((2, 6), -1.0)}
    edges = [0, *sorted(cuts), 48]
    for start, stop in pairwise(edges):
        for name, rect, view in iter_hf_views(shard, local[start:stop], start):
            assert (whole[name][rect.slices] == -1).all()
            whole[name][rect.slices] = view
    assert whole["a"][[0, 4]].eq(-1).all()
    assert whole["a"][1:4].flatten().tolist() == list(range(18))
    assert whole["b"].flatten().tolist() == list(range(18, 30))
