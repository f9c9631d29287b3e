"""The main job with rollout trees and with flat rows: the same metrics in its first steps."""

import pytest

from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.train.metric_lines import metric_lines

MEASUREMENTS = ("time/", "perf/", "memory/", "weight_sync/", "gpu/", "driver/", "gateway/")
"""Areas of metrics that are measured, and differ from run to run."""


def run_steps(assets, run_dir, trees):
    child = start(
        "experiment=smoke_ci",
        "deterministic=true",
        f"batch.trees={trees}",
        "evaluate.num_questions=4",
        "optim.num_minibatches=2",
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 420)
    assert code == 0, output[-3000:]
    return metric_lines(run_dir, "rl")


@pytest.mark.slow(120)
def test_the_main_job_has_the_metrics_of_flat_rows(assets, tmp_path):
    trees = run_steps(assets, tmp_path / "trees", "true")
    rows = run_steps(assets, tmp_path / "rows", "false")
    assert len(trees) == len(rows) == 3
    for got, expected in zip(trees, rows, strict=True):
        assert got["tree/token_ratio"] > 1.2
        names = [
            name
            for name, value in expected.items()
            if not isinstance(value, str)
            and not name.startswith(MEASUREMENTS)
            and not name.endswith(("_s", "latency"))
        ]
        assert len(names) > 60
        for name in names:
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name
