"""Runs of a mixture of experts with two equal ones, between which rounding decides."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides, make_task
from tests.train.metric_lines import metric_lines


@pytest.fixture(scope="module")
def undecided(tmp_path_factory):
    """Return the folder of a task whose model has a router with two almost equal rows."""
    folder = tmp_path_factory.mktemp("moe") / "toolqa"
    sizes = ("--num-experts", "8", "--num-train", "64", "--num-demonstrations", "64")
    make_task("toolqa", folder, *sizes, "--num-validation", "8", "--num-dev", "8")
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    # In the last layer, so that only tokens whose own experts differ have other log-probs. Tokens
    # that use one of two equal experts are undecided.
    router_ED = weights[max(name for name in weights if name.endswith("mlp.gate.weight"))]
    noise_D = torch.randn(router_ED.size(1), generator=torch.Generator().manual_seed(0))
    router_ED[1] = router_ED[0] * (1 + 1e-7 * noise_D)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def train(assets, run_dir, *overrides):
    """Return the metrics of steps that leave the weights as they are."""
    child = start(
        "experiment=smoke_moe",
        "total_steps=2",
        "sft.max_steps=1",
        "sft.lr=0",
        "optim.lr=0",
        "optim.num_minibatches=2",
        "algo.entropy_coef=0.001",  # so that groups with equal rewards are trained on, too
        "data.prompts_per_step=8",
        "evaluate.num_questions=4",
        "evaluate.num_samples=1",
        *overrides,
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 400)
    assert code == 0, output[-3000:]
    lines = metric_lines(run_dir, "rl")
    assert len(lines) == 2
    return lines


@pytest.mark.slow(150)
def test_replayed_routes_remove_the_mismatch_of_undecided_routers(undecided, tmp_path):
    run_dir = tmp_path / "sampled"
    for line in train(undecided, run_dir, "engine.tensor_parallel_size=2"):
        assert line["actor/routes_replayed"] == 1
        assert line["actor/routes_differing"] > 1e-3
        assert line["mismatch/logp_mean_abs"] < 1e-6
        assert line["mismatch/logp_max_abs"] < 1e-4
    for line in train(undecided, tmp_path / "off", "model.router_replay=off"):
        assert "actor/routes_replayed" not in line
        assert line["mismatch/logp_max_abs"] > 1e-3


@pytest.mark.slow(90)
def test_the_update_replays_the_routes_of_the_log_prob_pass(undecided, tmp_path):
    run_dir = tmp_path / "old"
    overrides = ("model.router_replay=old", "parallel.recompute=selective")
    for line in train(undecided, run_dir, *overrides):
        assert line["actor/routes_replayed"] == 1
        # The log-probs before the update are those of the policy's own routes.
        assert line["mismatch/logp_max_abs"] > 1e-3
        assert line["actor/approx_kl"] == pytest.approx(0, abs=1e-6)
