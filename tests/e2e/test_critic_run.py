"""A run with a critic on the policy's GPUs, one step off: values, GAE, KL in the reward, warm-up,
evaluation within, checkpoints; with the loss and the branching rule of `examples/`.
"""

import math

import pytest

from mega_agentrl.actor.checkpoint.checkpoint_dir import list_checkpoints
from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.train.metric_lines import metric_lines


@pytest.mark.slow(90)
def test_policy_and_critic_learn_side_by_side_one_step_behind_the_rollouts(assets, tmp_path):
    run_dir = tmp_path / "run"
    child = start(
        "experiment=smoke_ci",
        "algo.advantage=gae",
        "algo.loss=examples/my_loss.py",
        "rollout.branching=examples/my_branching.py",
        "algo.advantage_options.lam=0.95",
        "algo.kl_coef=0.01",
        "algo.kl_placement=reward",
        "cluster.colocated_models=true",
        "optim.critic_lr=1e-3",
        "optim.critic_warmup_steps=1",
        "evaluate.every_steps=2",
        "evaluate.num_questions=10",
        "evaluate.num_samples=2",
        "save_every_steps=1",
        "rollout.max_staleness=1",
        "algo.rollout_correction=token_truncate",
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 420)
    assert code == 0, output[-3000:]
    steps = metric_lines(run_dir, "rl")
    # Nothing is ahead of the first step, and the critic's warm-up makes no new weights.
    assert [line["rollout/staleness_max"] for line in steps] == [0.0, 1.0, 1.0]
    assert [line["critic/is_warmup"] for line in steps] == [1.0, 0.0, 0.0]
    assert [line["actor/num_tokens"] > 0 for line in steps] == [False, True, True]
    for line in steps:
        assert math.isfinite(line["critic/explained_variance"])
        assert line["critic/loss"] > 0 and line["critic/grad_norm"] > 0
        assert 0 <= line["critic/clipfrac"] <= 1
    # The metric of the loss of `examples/`; one minibatch a step starts at the old policy.
    ratios = [line["actor/importance_ratio"] for line in steps[1:]]
    assert ratios == pytest.approx([1.0, 1.0], abs=1e-3)
    # Values are 0 before the first update, and what they are after it follows the returns.
    assert steps[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1]["critic/value_mean"] * steps[0]["critic/return_mean"] > 0
    (during,) = metric_lines(run_dir, "held_out_during")
    assert during["step"] == 2
    assert 0 <= during["sampled/pass@1"] <= during["sampled/pass@2"] <= 1
    names = [path.name for path, _ in list_checkpoints(run_dir / "critic")]
    assert names == ["step-000001", "step-000002", "step-000003"]
