"""A run of the task with pictures: engine and policy see the same, and the page shows it."""

import json

import pytest

from tests.e2e.conftest import finish_training, start
from tests.e2e.overrides import make_task, task_overrides
from tests.train.metric_lines import check_mismatch

SIZES = ("--num-train=60", "--num-dev=20", "--num-validation=20", "--num-demonstrations=400")


@pytest.mark.slow(120)
def test_an_agent_that_zooms_is_trained_on_what_the_engine_saw(tmp_path):
    data, run_dir = tmp_path / "vision", tmp_path / "run"
    make_task("vision", data, *SIZES)
    child = start(
        "experiment=smoke_vision",
        "total_steps=2",
        "sft.max_steps=100",
        "data.prompts_per_step=8",
        "evaluate.num_questions=20",
        "report.save_trees_every_steps=1",
        *task_overrides(data, run_dir),
    )
    lines = finish_training(child, run_dir, 2)
    check_mismatch(lines, 1e-5)
    assert sum(line["rollout/tool/zoom/num_ok"] for line in lines) > 0
    images = {path.stem for path in (run_dir / "rollouts" / "images").iterdir()}
    trees = [
        json.loads(line)
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    shown = {
        placed["image"]["image_id"]
        for tree in trees
        for place in (tree["prompt"], *tree["leaves"])
        for placed in place["images"]
    }
    assert len(shown) > len(trees), "pictures, and quarters of some of them"
    assert shown <= images
    assert '"src":"data:image/png;base64,' in (run_dir / "report.html").read_text()
    assert "[image 56 x 56]Region [" in (run_dir / "rollouts.txt").read_text()
