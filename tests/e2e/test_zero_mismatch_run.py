"""A run in exact arithmetic: engine and policy have the same log-probs."""

import pytest

from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.train.metric_lines import metric_lines


@pytest.mark.slow(180)
def test_no_log_prob_differs_by_a_bit(assets, tmp_path):
    """One policy rank and two tensor ranks of an engine, which has adapters merged.

    `tests/actor/model/test_exact_layers` has the policy's other layouts.
    """
    child = start(
        "experiment=smoke_ci",
        "model.zero_mismatch=true",
        "optim.lr=1e-3",
        "total_steps=2",
        "evaluate.num_questions=4",
        "parallel=single",
        "engine.tensor_parallel_size=2",
        "model.lora.rank=4",
        "rollout.temperature=0.7",
        "rollout.top_p=0.9",
        *asset_overrides(assets, tmp_path / "run"),
    )
    code, output = finish(child, 420)
    assert code == 0, output[-3000:]
    lines = metric_lines(tmp_path / "run", "rl")
    assert len(lines) == 2
    for line in lines:
        assert line["mismatch/logp_max_abs"] == 0
        assert line["weight_sync/probe_gap"] == 0
