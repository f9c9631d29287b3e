"""The search for the first difference between engine and policy, with planted differences."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy

import numpy as np
import pytest

pytest.importorskip("vllm")

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.reshard.verify.layer_mismatch import (
    PointError,
    compare_points,
    describe_difference,
    first_difference,
    largest_by_kind,
)
from tests.generator.engine_host import EngineHost
from tests.generator.tiny_model import write_moe_model

NUM_LAYERS, DENSE_LAYER = 4, 1
TOKENS = np.random.default_rng(5).integers(3, 300, 48).tolist()


def _layer(worker, number):
    return worker.model_runner.get_model().model.layers[number]


def plant_rope(worker, number):
    attention = _layer(worker, number).self_attn
    worker.planted = attention, attention.rotary_emb
    attention.rotary_emb = deepcopy(attention.rotary_emb)
    attention.rotary_emb.cos_sin_cache.mul_(1.01)


def undo_rope(worker):
    attention, attention.rotary_emb = worker.planted[0], worker.planted[1]


def plant_epsilon(worker, number, *path):
    norm = _layer(worker, number) if number is not None else worker.model_runner.get_model().model
    for name in path:
        norm = getattr(norm, name)
    worker.planted = norm, norm.variance_epsilon
    norm.variance_epsilon *= 1e4


def undo_epsilon(worker):
    worker.planted[0].variance_epsilon = worker.planted[1]


def plant_head(worker, _):
    processor = worker.model_runner.get_model().logits_processor
    worker.planted = processor.register_forward_hook(lambda *call: call[-1].bfloat16().float())


def undo_hook(worker):
    worker.planted.remove()


def plant_expert(worker, number):
    experts = _layer(worker, number).mlp.experts.named_parameters()
    worker.planted = [weight.data for name, weight in experts if "w13" in name or "w2" in name]
    assert len(worker.planted) == 2
    for weight in worker.planted:
        weight.copy_(weight.roll(1, 0))


def undo_expert(worker):
    for weight in worker.planted:
        weight.copy_(weight.roll(-1, 0))


def plant_router(worker, number):
    def exchange(_, __, output):
        return output[0].roll(1, -1), *output[1:]

    worker.planted = _layer(worker, number).mlp.gate.register_forward_hook(exchange)


SPARSE = [number for number in range(NUM_LAYERS) if number != DENSE_LAYER]
CASES = [
    *((f"layers.{k}.query", plant_rope, k, undo_rope) for k in range(NUM_LAYERS)),
    *(
        (f"layers.{k}.attention_norm", plant_epsilon, (k, "input_layernorm"), undo_epsilon)
        for k in range(NUM_LAYERS)
    ),
    *(
        (f"layers.{k}.mlp_norm", plant_epsilon, (k, "post_attention_layernorm"), undo_epsilon)
        for k in range(NUM_LAYERS)
    ),
    ("layers.0.query", plant_epsilon, (0, "self_attn", "q_norm"), undo_epsilon),
    ("layers.3.key", plant_epsilon, (3, "self_attn", "k_norm"), undo_epsilon),
    ("final_norm", plant_epsilon, (None, "norm"), undo_epsilon),
    ("log_probs", plant_head, 0, undo_hook),
    *((f"layers.{k}.mlp", plant_expert, k, undo_expert) for k in SPARSE),
    *((f"layers.{k}.experts", plant_router, k, undo_hook) for k in SPARSE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moe_model(tmp_path_factory.mktemp("moe"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    config = EngineConfig(max_model_len=64, cpu_kv_cache_gib=1)
    log_path = tmp_path_factory.mktemp("engine") / "vllm.log"
    host = EngineHost(config, folder, log_path, return_routes=True)
    yield host
    host.close()


@pytest.fixture(scope="module")
def find(folder, engine):
    """Return a function that compares the engine with the policy, and the policy's values."""
    from mega_agentrl.actor.megatron_model import RankInfo
    from mega_agentrl.actor.model.layer_probe import probe_chunk
    from mega_agentrl.actor.policy import PolicyRank
    from mega_agentrl.runtime.free_port import free_port

    config = TrainConfig(model=ModelConfig(path=str(folder)))
    rank = RankInfo(
        rank=0, world_size=1, master_address="127.0.0.1", master_port=free_port(), timeout_s=60.0
    )
    with closing(PolicyRank(config, rank)) as policy:
        policy.load_hf(str(folder))

        def compare():
            values = engine.call("probe_layers", TOKENS)
            (chunk,) = policy.megatron_model.chunks
            with probe_chunk(chunk.module, values) as own:
                log_probs = policy.compute_prompt_log_probs(TOKENS)
            return compare_points(values, own | {"log_probs": np.array(log_probs)}, "float32")

        yield compare


@pytest.mark.slow(30)
def test_equal_models_differ_nowhere(find):
    errors = find()
    assert first_difference(errors) is None
    assert {error.kind for error in errors} == {
        "embedding",
        "attention_norm",
        "query",
        "key",
        "value",
        "attention",
        "attention_output",
        "mlp_norm",
        "experts",
        "mlp",
        "final_norm",
        "log_probs",
    }
    assert len(errors) == 3 + 9 * NUM_LAYERS - 1


@pytest.mark.slow(1)
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_the_place_of_a_planted_difference_is_named(case, find, engine):
    point, plant, where, undo = case
    where = where if isinstance(where, tuple) else (where,)
    engine.call("rpc", plant, None, where)
    try:
        found = first_difference(find())
    finally:
        engine.call("rpc", undo)
    assert found is not None
    assert found.point == point


def test_at_least_twenty_differences_are_planted():
    assert len(CASES) >= 20


def values(**changes):
    """Values of a layer of two tokens, with changes by point."""
    points = ("embedding", "layers.0.query", "layers.0.mlp", "final_norm", "log_probs")
    return {point: np.ones((2, 3)) for point in points} | changes


def test_points_are_compared_in_the_order_of_computation():
    engine = values(**{"layers.10.key": np.ones((2, 3)), "layers.2.key": np.ones((2, 3))})
    assert [error.point for error in compare_points(engine, engine, "float32")] == [
        "embedding",
        "layers.0.query",
        "layers.0.mlp",
        "layers.2.key",
        "layers.10.key",
        "final_norm",
        "log_probs",
    ]


def test_an_mlp_is_compared_where_the_experts_are_the_same():
    experts = np.array([[0, 1], [2, 3]])
    mlp = np.array([[1.0, 1.0, 1.0], [9.0, 9.0, 9.0]])
    engine = values(**{"layers.0.experts": experts})
    policy = values(**{"layers.0.experts": np.array([[0, 1], [2, 4]]), "layers.0.mlp": mlp})
    errors = {error.point: error for error in compare_points(engine, policy, "float32")}
    assert errors["layers.0.mlp"].error == 0
    assert errors["layers.0.experts"].error == 0.5
    assert first_difference(errors.values()).point == "layers.0.experts"


def test_a_value_that_is_not_a_number_differs():
    engine = values(**{"layers.0.query": np.full((2, 3), np.nan)})
    found = first_difference(compare_points(engine, values(), "float32"))
    assert found.point == "layers.0.query"
    assert "rotary embedding" in describe_difference(found)
    assert "no point differs" in describe_difference(None)


def test_the_largest_error_of_each_kind_is_kept():
    errors = [
        PointError(point=f"layers.{k}.mlp", error=error, limit=1.0)
        for k, error in enumerate([0.1, 0.3, 0.2])
    ]
    assert [error.point for error in largest_by_kind(errors)] == ["layers.1.mlp"]


def test_other_shapes_are_an_error():
    with pytest.raises(ValueError):
        compare_points(values(), values(final_norm=np.ones((2, 4))), "float32")
