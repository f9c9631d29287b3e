"""A run with a critic, one step off: values, GAE, KL in the reward, warm-up, evaluation within,
checkpoints.
"""

import json
import math

import pytest

from mega_agentrl.actor.checkpoint_folder import finished
from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides


@pytest.mark.slow
def test_policy_and_critic_learn_side_by_side_one_step_behind_the_rollouts(assets, tmp_path):
    run_dir = tmp_path / "run"
    child = start(
        "experiment=smoke_ci",
        "algo.advantage=gae",
        "algo.lam=0.95",
        "algo.kl_coef=0.01",
        "algo.kl_place=reward",
        "optim.critic_lr=1e-3",
        "optim.critic_warmup_steps=1",
        "evaluate.every=2",
        "evaluate.num_questions=10",
        "evaluate.num_samples=2",
        "save_every=1",
        "rollout.staleness=1",
        "algo.correction=token_truncate",
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 420)
    assert code == 0, output[-3000:]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    # Nothing is ahead of the first step, and the critic's warm-up makes no new weights.
    assert [line["rollout/staleness_max"] for line in steps] == [0.0, 1.0, 1.0]
    assert [line["value/warmup"] for line in steps] == [1.0, 0.0, 0.0]
    assert [line["update/num_tokens"] > 0 for line in steps] == [False, True, True]
    for line in steps:
        assert math.isfinite(line["value/explained_variance"])
        assert line["value/loss"] > 0 and line["value/grad_norm"] > 0
        assert 0 <= line["value/clipped"] <= 1
    # Values are 0 before the first update, and what they are after it follows the returns.
    assert steps[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1]["value/mean"] * steps[0]["value/return"] > 0
    during = [line for line in lines if line["stage"] == "held_out_during"]
    assert [line["step"] for line in during] == [2]
    assert 0 <= during[0]["sampled/pass@1"] <= during[0]["sampled/pass@2"] <= 1
    names = [path.name for path, _ in finished(run_dir / "critic")]
    assert names == ["step-000001", "step-000002", "step-000003"]
