"""Options that change what is trained on, together in runs with the real policy and engine."""

import pytest

from tests.e2e.conftest import finish_training, start
from tests.e2e.overrides import asset_overrides, make_task, task_overrides
from tests.reward.test_llm_judge import Server


@pytest.mark.slow(90)
def test_ares_with_bootstrap_filter_judge_and_a_reward_function_two_steps_ahead(assets, tmp_path):
    run_dir = tmp_path / "run"
    with Server("0.5") as judge:
        child = start(
            "experiment=smoke_ci",
            "algo=ares",
            "algo.ares.bootstrap=true",
            "algo.rollout_correction=token_truncate",
            "rollout.max_staleness=2",
            "rollout.filter_metric=reward",
            "rollout.filter_range=[-2,2]",
            "rollout.num_oversampled_prompts=2",
            "+reward.functions.mine=examples/my_reward.py:compute_score",
            "+reward.rubric.default={arpo:1,mine:0.5,model:0.2}",
            f"reward.model.path_or_url={judge.base_url}",
            "reward.model.served_model_name=grader",
            "evaluate.num_questions=4",
            *asset_overrides(assets, run_dir),
        )
        lines = finish_training(child, run_dir, 3)
        assert judge.bodies
        judge.shutdown()
    assert max(line["rollout/staleness_max"] for line in lines) in (1.0, 2.0)
    for line in lines:
        # The judge says 0.5 of everything, which the rubric takes a fifth of.
        assert line["reward/model"] == pytest.approx(0.1)
        assert 0 <= line["reward/mine"] <= 0.5
        assert line["reward/failed_fraction"] == 0


@pytest.mark.slow(90)
def test_function_calls_in_the_models_template_are_trained_on(tmp_path):
    data, run_dir = tmp_path / "calls", tmp_path / "run"
    make_task("calls", data)
    child = start(
        "experiment=smoke_calls",
        "total_steps=2",
        "sft.max_steps=150",
        "data.prompts_per_step=8",
        "evaluate.num_questions=10",
        *task_overrides(data, run_dir),
    )
    lines = finish_training(child, run_dir, 2)
    assert any(0 < line["rollout/reward_mean"] < 1 for line in lines)
