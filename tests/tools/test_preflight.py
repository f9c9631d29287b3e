"""`tools/preflight.py`: recipes pass, broken variants are refused with the right key, no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import preflight

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]

RECIPES = {
    "qwen2_5_7b_8gpu": ("qwen2.5-7b", 8),
    "qwen3_32b_64gpu": ("qwen3-32b", 64),
    "qwen2_5_72b_64gpu": ("qwen2.5-72b", 64),
    "qwen2_5_72b_128gpu": ("qwen2.5-72b", 128),
    "qwen2_5_72b_32k_64gpu": ("qwen2.5-72b", 64),
    "qwen3_30b_a3b_32gpu": ("qwen3-30b-a3b", 32),
    "qwen3_235b_a22b_512gpu": ("qwen3-235b-a22b", 512),
    "arpo_7b_reasoning": ("qwen2.5-7b", 8),
    "arpo_8b_deepsearch": ("qwen3-8b", 8),
    "arpo_14b_deepsearch": ("qwen3-14b", 16),
    "egpo_qwen3_4b": ("qwen3-4b", 8),
    "ares_7b": ("qwen2.5-vl-7b", 8),
}
GIVEN = ("data.train=a", "data.validation=b", "tool.search.source=http://search")
"""Settings that the recipes of published runs require."""


def run(recipe, *arguments, capsys):
    model, num_gpus = RECIPES[recipe]
    config = ROOT / "tools" / "model_configs" / f"{model}.json"
    code = preflight.main(
        [
            f"experiment={recipe}",
            *(() if "gpu" in recipe else GIVEN),
            *arguments,
            *("--model-config", str(config), "--gpus", str(num_gpus), "--no-files", "--json"),
        ]
    )
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=pytest.mark.slow(9) if "235b" in one else ()) for one in RECIPES],
)
def test_a_recipe_passes_on_all_its_gpus(recipe, capsys):
    code, found = run(recipe, capsys=capsys)
    assert (code, found["problems"]) == (0, [])
    assert found["num_gpus"] == RECIPES[recipe][1]
    assert max(stage["peak"] for stage in found["policy"]) < 76.8 * 2**30
    assert found["transfer"]["predicted_s"] < 2
    # The step: no side idles, and the update uses the GPUs.
    step = found["step"]
    assert max(step["policy_idle"], step["engine_idle"]) <= 0.15
    assert step["mfu"] >= (0.25 if "a3b" in recipe or "a22b" in recipe else 0.35)
    assert found["balance"] == []
    text = (ROOT / "configs" / "experiment" / f"{recipe}.yaml").read_text()
    (hours,) = re.findall(r"([\d,]+) GPU hours for 100", text.replace("\n# ", " "))
    assert float(hours.replace(",", "")) == pytest.approx(step["gpu_hours_per_100_steps"], rel=0.05)


BROKEN = [
    ("qwen3_32b_64gpu", "optim.micro_batch_tokens=32768", "optim.micro_batch_tokens"),
    ("qwen3_32b_64gpu", "parallel.sequence_parallel=false", "parallel.sequence_parallel"),
    ("qwen3_32b_64gpu", "parallel.distributed_optimizer=false", "parallel.distributed_optimizer"),
    ("qwen3_235b_a22b_512gpu", "parallel.recompute=none", "parallel.recompute"),
    ("qwen3_235b_a22b_512gpu", "parallel.expert=2", "parallel.expert"),
    ("qwen3_32b_64gpu", "engine.gpu_memory_utilization=0.97", "engine.gpu_memory_utilization"),
    ("qwen3_32b_64gpu", "engine.gpu_memory_utilization=0.2", "engine.gpu_memory_utilization"),
    ("qwen3_32b_64gpu", "weight_sync.bucket_mib=40000", "weight_sync.bucket_mib"),
    (
        "qwen3_235b_a22b_512gpu",
        "engine.tensor_parallel_size=4 cluster.num_engines=104",
        "engine.tensor_parallel_size",
    ),
    ("qwen3_32b_64gpu", "cluster.num_engines=9", "cluster.num_engines"),
    ("qwen3_32b_64gpu", "parallel.tensor=16 parallel.data=2", "parallel.tensor"),
    ("qwen3_32b_64gpu", "parallel.tensor=3", "parallel.tensor"),
    ("qwen2_5_7b_8gpu", "parallel.tensor=x", "parallel.tensor"),
    ("qwen2_5_7b_8gpu", "optim.micro_batch_token=1", "optim.micro_batch_token"),
    ("qwen2_5_7b_8gpu", "optim.lr=-1", "optim.lr"),
    ("qwen2_5_7b_8gpu", "algo.loss=/nowhere/none.py", "algo.loss"),
    ("qwen2_5_7b_8gpu", "algo.loss_options.clip_hihg=0.3", "algo.loss_options.clip_hihg"),
]


@pytest.mark.parametrize(("recipe", "changes", "key"), BROKEN)
def test_a_broken_recipe_is_refused_with_the_key(recipe, changes, key, capsys):
    code, found = run(recipe, *changes.split(), capsys=capsys)
    assert code == 1
    assert found["runs"] is False
    assert found["problems"][0]["config_key"] == key


def test_a_recipe_passes_with_the_users_own_algorithm(capsys):
    overrides = [
        f"algo.advantage={ROOT}/examples/my_algorithm.py",
        f"algo.loss={ROOT}/examples/my_loss.py",
        "algo.loss_options.max_ratio=1.5",
        f"rollout.branching={ROOT}/examples/my_branching.py",
    ]
    code, found = run("qwen2_5_7b_8gpu", *overrides, capsys=capsys)
    assert (code, found["problems"]) == (0, [])


def test_the_offered_value_passes(capsys):
    _, found = run("qwen3_32b_64gpu", "optim.micro_batch_tokens=32768", capsys=capsys)
    offered = found["problems"][0]["suggestions"][0].split()[0]
    code, found = run("qwen3_32b_64gpu", offered, capsys=capsys)
    assert (code, found["problems"]) == (0, [])


def test_a_model_must_be_named(capsys):
    assert preflight.main(["experiment=qwen3_32b_64gpu", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["config_key"] == "model.path"


def test_all_lengths_are_solved_at_once(capsys):
    lengths = ("data.max_prompt_tokens=9000", "optim.micro_batch_tokens=512")
    code, found = run("qwen2_5_7b_8gpu", *lengths, capsys=capsys)
    (problem,) = found["problems"]
    assert (code, problem["config_key"]) == (1, "engine.max_model_len")
    assert "optim.micro_batch_tokens=512" in problem["message"]
    code, found = run(
        "qwen2_5_7b_8gpu", *lengths, *problem["suggestions"][0].split(), capsys=capsys
    )
    assert not any(one["config_key"] == "engine.max_model_len" for one in found["problems"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=qwen3_32b_64gpu"],
        ["experiment=qwen3_32b_64gpu", "parallel.tensor=3", "--model-config", "--no-files"],
    ],
    ids=["no_model", "divisors"],
)
def test_a_refusal_without_a_search_does_not_say_that_there_is_no_solution(arguments, capsys):
    if "--model-config" in arguments:
        config = ROOT / "tools" / "model_configs" / "qwen3-32b.json"
        arguments.insert(arguments.index("--model-config") + 1, str(config))
    assert preflight.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "cannot run" in printed and "no solution" not in printed


def test_an_ambiguous_flag_names_both_that_it_may_mean(capsys):
    with pytest.raises(SystemExit) as left:
        preflight.main(["experiment=smoke", "--gpu", "8"])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert "--gpus N" in said and "--gpu-gib GIB" in said


def smoke(assets, *arguments):
    """Arguments of the smoke run's preflight."""
    paths = {
        "model.path": "model",
        "data.train": "train.parquet",
        "data.validation": "validation.parquet",
        "sft.train_data": "demonstrations.parquet",
        "sft.dev_data": "dev.parquet",
        "tool.search.source": "corpus.jsonl",
    }
    overrides = [f"{key}={assets / name}" for key, name in paths.items()]
    return ["experiment=smoke", *overrides, *arguments, "--cpu"]


def test_the_smoke_run_passes_with_its_prompts_read(assets):
    files = (
        f"data.train=[file://{assets}/train.parquet@2]",
        "data.validation=s3://bucket/a.parquet",
    )
    command = [sys.executable, preflight.__file__, *smoke(assets, *files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for fact in (
        "data.validation: remote files are not checked",
        "data.train: 200 prompts",
        "3 devices",
    ):
        assert fact in done.stdout
    assert done.stdout.count("batch.trees=true") == 1


@pytest.mark.extended
def test_flat_rows_have_no_line_on_trees(assets, capsys):
    assert preflight.main(smoke(assets, "--json")) == 0
    (note,) = [one for one in json.loads(capsys.readouterr().out)["notes"] if "trees" in one]
    assert "tree/token_ratio is at least 1." in note
    assert preflight.main(smoke(assets, "batch.trees=false", "--json")) == 0
    assert not any("trees" in one for one in json.loads(capsys.readouterr().out)["notes"])


def test_prompts_that_are_too_long_are_refused(assets, capsys):
    assert preflight.main(smoke(assets, "data.max_prompt_tokens=5", "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    problem = found["problems"][0]
    assert problem["config_key"] == "data.max_prompt_tokens"
    longest = found["prompts"][0]["max_prompt_tokens"]
    assert problem["suggestions"][0] == f"data.max_prompt_tokens={longest} (from 5)"


@pytest.mark.extended
def test_a_longer_prompt_comes_with_the_other_lengths_that_it_needs(assets, capsys):
    lengths = ("data.max_prompt_tokens=5", "engine.max_model_len=101")
    assert preflight.main(smoke(assets, *lengths, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    longest = found["prompts"][0]["max_prompt_tokens"]
    offered = found["problems"][0]["suggestions"][0].split(" with ")
    changes = [change.split()[0] for change in offered]
    assert changes == [
        f"data.max_prompt_tokens={longest}",
        f"engine.max_model_len={longest + 96}",  # rollout.max_response_tokens
    ]
    assert preflight.main(smoke(assets, *changes, "--json")) == 0


def test_a_growing_conversation_is_compared_with_the_template(assets, capsys):
    lengths = ("data.max_prompt_tokens=500", "engine.max_model_len=600")
    assert preflight.main(smoke(assets, "rollout=hermes", *lengths, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"][0]["max_prompt_tokens"] > 100, "the tools are described in the prompt"
    assert any("encoding turn by turn equals" in note for note in found["notes"])
