"""A runner of two algorithms whose runs are not started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.config.schema import TrainConfig
from tools.compare.budget import Budget
from tools.compare.plan import TASKS, CheckedConfig, CompareOptions
from tools.compare.task_runner import TaskRunner


@pytest.fixture
def make_runner(tmp_path):
    def make(**changes):
        options = CompareOptions(
            out=tmp_path,
            seeds=(1, 2),
            learning_rates=(1e-4, 4e-4),
            tuning_seed=9,
            budget=Budget(num_tokens=500, num_steps=None, num_evaluations=1),
            save_every=2,
            overrides=(),
        )
        config = TrainConfig(run_dir=str(tmp_path / "orders"))
        checked = CheckedConfig(config=config, settings={"optim": {"lr": 1.0}})
        return TaskRunner(
            task=TASKS["orders"],
            options=replace(options, **changes),
            base=checked,
            algorithms={"grpo": checked, "arpo": checked},
            skipped={"gigpo": "one turn"},
        )

    return make
