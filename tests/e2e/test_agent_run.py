"""A run whose agent talks to an SDK: engine and policy see the same tokens, forks included."""

import pytest

from tests.e2e.conftest import ROOT, finish_training, start
from tests.e2e.overrides import make_task, task_overrides
from tests.train.metric_lines import check_mismatch

SIZES = ("--num-train=60", "--num-dev=20", "--num-validation=20", "--num-demonstrations=2000")


@pytest.mark.slow(120)
def test_an_agent_that_talks_to_an_sdk_is_trained_and_forked(tmp_path):
    data, run_dir = tmp_path / "toolqa_chat", tmp_path / "run"
    make_task("toolqa_chat", data, *SIZES)
    agent = ROOT / "examples" / "openai_agent.py"
    child = start(
        "experiment=smoke_openai",
        f"rollout.agent._target_={agent}:run",
        "rollout.branching=after_result",
        "rollout.branch.alpha=5",  # forks wherever it is asked
        "sft.max_steps=400",
        "total_steps=2",
        "data.prompts_per_step=8",
        "evaluate.num_questions=20",
        f"tool.search.source={data}/corpus.jsonl",
        *task_overrides(data, run_dir),
    )
    lines = finish_training(child, run_dir, 2)
    check_mismatch(lines, 1e-5)
    for line in lines:
        assert line["rollout/forks_per_prompt"] > 0
        assert "rollout/abandoned_forks_per_prompt" not in line
        assert line["rollout/stop/agent_failure"] == 0
    assert sum(line["rollout/tool_calls_mean"] for line in lines) > 0
