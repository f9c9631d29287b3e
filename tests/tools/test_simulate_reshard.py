"""The simulation of a small model by the script, against a plan made from every layout."""

import json
from pathlib import Path

import pytest

from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.owner_expansion import first_layer_of_each_type
from tools import simulate_reshard

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "tools" / "model_configs").glob("*.json"))
# Parameters of the released models as their cards have them. The DeepSeek-sized model has three
# more layers than the released one, all dense, so that 16 stages divide them.
BILLIONS = {
    "qwen2.5-7b": 7.6,
    "qwen2.5-vl-7b": 8.292,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-vl-8b": 8.767,
    "qwen3-14b": 14.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v3-sized": 672,
}


def shape_of(config, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelShape.from_folder(folder)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_are_those_of_the_models(path, tmp_path):
    shape = shape_of(json.loads(path.read_text()), tmp_path)
    assert simulate_reshard.num_parameters(shape) / 1e9 == pytest.approx(
        BILLIONS[path.stem], rel=0.01
    )
    assert {case.model for case in simulate_reshard.CASES} <= BILLIONS.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_sample_has_one_layer_of_each_kind(path, tmp_path):
    config = json.loads(path.read_text())
    shape = shape_of(config, tmp_path / "whole")
    sample = shape_of(simulate_reshard.sample_config(config, shape), tmp_path / "sample")
    sparse = [shape.is_moe_layer(layer) for layer in first_layer_of_each_type(shape)]
    assert [sample.is_moe_layer(layer) for layer in range(sample.num_layers)] == sparse
    assert sample.hidden_size == shape.hidden_size


@pytest.fixture
def small(tmp_path):
    config = json.loads((ROOT / "tools" / "model_configs" / "deepseek-v3-sized.json").read_text())
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "vocab_size": 61,
    }
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config | sizes))
    return path


def test_every_recipe_that_trains_a_released_model_is_a_case():
    recipes = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    own_model = {recipe for recipe in recipes if recipe.startswith("smoke")}
    assert set(simulate_reshard.RECIPES) == recipes - own_model
    case = simulate_reshard.recipe_case("qwen3_235b_a22b_512gpu")
    assert case.trainer == {"tensor": 1, "pipeline": 12, "data": 8, "expert": 8}
    assert case.rollout == {"tensor": 8, "engines": 52}


KEYS = {
    "bench", "case", "open_gib", "open_limit_gib", "peers_max", "peers_limit", "setup_s",
    "replace_s", "predicted_s", "floor_s", "received_ratio", "network_gib", "min_network_gib",
    "published", "connections", "connections_max", "connections_limit", "store_requests",
    "groups_max", "control_mib", "control_limit_mib",
}  # fmt: skip


def line_of(capsys, *arguments):
    assert simulate_reshard.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_a_small_model_keeps_the_bounds(small, capsys):
    run = ("--model", str(small), "--trainer", "tensor=2,pipeline=2,data=2,expert=4")
    line = line_of(capsys, *run, "--rollout", "tensor=4,engines=2")
    assert line.keys() >= KEYS
    assert (line["trainer_ranks"], line["rollout_ranks"]) == (8, 8)
    assert line["received_ratio"] == 1.0
    assert line["network_gib"] == line["min_network_gib"]
    assert line["peers_max"] <= line["peers_limit"] == 32
    assert line["open_gib"] <= line["open_limit_gib"]
    assert 0 < line["copy_calls_max"] < line["copies_max"]
    assert line["connections_max"] <= line["connections_limit"] == 2 * 32 + 1
    assert line["connections"] < 16 + 16 * 15 / 2, "a full mesh"
    assert 0 < line["groups_max"] <= simulate_reshard.GROUPS_LIMIT
    assert 0 < line["control_mib"] < 1


@pytest.mark.slow(30)
def test_the_largest_cluster_with_limits_keeps_those_of_the_control_path(capsys):
    simulate_reshard.main(["--case", "235b-a22b-768"])
    line = json.loads(capsys.readouterr().out)
    assert (line["trainer_ranks"], line["rollout_ranks"]) == (512, 256)
    assert line["connections"] < 768 * 767 / 2 / 20
    assert line["store_requests"] == 4 * 768 + 1 + 4 * (line["connections"] - 768)
    assert line["control_limit_mib"] == simulate_reshard.CONTROL_LIMIT_MIB
    # Those of CPU seconds depend on the machine.
    problems = simulate_reshard.broken_bounds(line)
    assert [problem for problem in problems if "_s=" not in problem] == []


def test_colocated_ranks_on_one_machine_use_no_network(small, capsys):
    run = ("--model", str(small), "--colocated", "--rollout", "tensor=2,engines=2")
    line = line_of(capsys, *run, "--trainer", "data=4")
    assert line["network_gib"] == 0


def test_a_broken_bound_ends_with_code_1(small, capsys, monkeypatch):
    monkeypatch.setattr(simulate_reshard, "PEERS_LIMIT", 0)
    run = ["--model", str(small), "--rollout", "tensor=2,engines=1"]
    assert simulate_reshard.main(run) == 1
    assert "peers_max=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], "--model nothing: expected"),
        (["--trainer", "tensor=2,expert=4"], "expert: got 4"),
        (["--network-gbs", "0"], "network: got 0"),
    ],
)
def test_sizes_that_do_not_fit_end_with_code_2(small, capsys, arguments, message):
    assert simulate_reshard.main(["--model", str(small), *arguments]) == 2
    assert message in capsys.readouterr().err
