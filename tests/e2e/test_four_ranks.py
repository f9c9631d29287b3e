"""The whole system with every cut: TP 2 x PP 2 policy, vLLM TP 2, warm start and two RL steps.

Policy and engine take turns as on shared GPUs: between them lie all weights and all checkpoints.
"""

import json

import pytest
from safetensors import safe_open

from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.report.chromium import Chromium, needs_browser
from tests.reshard.rollout_cuts import rollout_layout
from tests.train.metric_lines import check_mismatch, metric_lines

pytestmark = pytest.mark.slow(45)


def own_bytes(folder, tensor):
    """The largest shard of an engine's workers in float32: what each of them receives."""
    shape = ModelShape.from_folder(folder)
    layouts = [rollout_layout(shape, rank, tensor) for rank in range(tensor)]
    return max(
        4 * sum(block.hf_rect.numel for shard in layout for block in shard.blocks)
        for layout in layouts
    )


@pytest.fixture(scope="module")
def finished_run(assets, tmp_path_factory):
    """Its folder, and what it said."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    child = start(
        "experiment=smoke_ci",
        "parallel=tp2_pp2",
        "engine.tensor_parallel_size=2",
        "cluster.colocated=true",
        "total_steps=2",
        "sft.max_steps=2",
        "data.prompts_per_step=2",
        "algo.entropy_coef=0.001",  # so that groups with equal rewards are trained on, too
        "rollout.temperature=0.7",  # log-probs count before top-p and at this temperature
        "rollout.top_p=0.9",
        "evaluate.num_questions=4",
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 560)
    assert code == 0, output[-3000:]
    return run_dir, output


def test_a_tp2_pp2_policy_trains_with_a_tp2_engine(assets, finished_run):
    run_dir, output = finished_run
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_steps"] == 2
    assert 0 <= summary["mismatch_mean_abs"] < 1e-3
    steps = metric_lines(run_dir, "rl")
    assert [line["step"] for line in steps] == [1, 2]
    check_mismatch(steps, 1e-3, ("logp_mean_abs", "entropy_max_abs"))
    for line in steps:
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/failed_fraction"] == 0
        assert line["weight_sync/bytes_per_worker"] == own_bytes(f"{assets}/model", 2)
        # The median of the probe's differences: 0 on processors where most of them round alike.
        assert 0 <= line["weight_sync/probe_gap"] < 1e-3
    assert (run_dir / "reward.png").exists()
    assert "held-out reward after RL" in output
    with (
        safe_open(assets / "model" / "model.safetensors", "pt") as before,
        safe_open(next((run_dir / "model").glob("*.safetensors")), "pt") as after,
    ):
        name = "model.layers.0.mlp.down_proj.weight"
        assert not before.get_tensor(name).equal(after.get_tensor(name)), "nothing was learned"


@needs_browser
def test_the_report_page_shows_a_tree_in_a_browser(finished_run, tmp_path):
    page = (finished_run[0] / "report.html").as_uri()
    with Chromium(tmp_path) as browser:
        browser.open(page)
        assert browser.run("document.querySelectorAll('.tree .path').length") == 8
        assert browser.run("document.querySelector('.tree').getBoundingClientRect().height") > 100
        assert browser.requests() == [page]
        assert browser.errors == []
