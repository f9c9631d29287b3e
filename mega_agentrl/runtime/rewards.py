"""The rubric of a run with all that works for it: worker processes, the way to a judge.

Only what the rubric needs is started; the environment is read here. What a reward model in a
folder needs is a group of ranks of its own, `reward_group`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mega_agentrl.config.reward_schema import MODEL_PART
from mega_agentrl.reward.judge import Judge
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.reward.user_function import UserFunction, warm_up
from mega_agentrl.sandbox.workers import WorkerPool

if TYPE_CHECKING:
    from mega_agentrl.config.reward_schema import RewardConfig


@contextmanager
def open_rubric(config: RewardConfig) -> Iterator[WeightedRubric]:
    """The rubric, ready; its processes are ended on the way out.

    Raises `ValueError` for a function that cannot be loaded or called and for an environment
    variable that is not there.
    """
    with ExitStack() as stack:
        functions: dict[str, UserFunction] = {}
        used = {name: path for name, path in config.functions.items() if name in config.parts}
        if used:
            pool = WorkerPool(
                config.workers,
                config.deadline_s,
                warm_up=[warm_up(path) for path in used.values()],
                environment={name: _variable("environment", name) for name in config.environment},
            )
            stack.callback(pool.close)
            pool.start()
            functions = {name: UserFunction(pool, path) for name, path in used.items()}
        judge = None
        if MODEL_PART in config.parts and config.model.served_elsewhere:
            key = config.model.key_env
            judge = Judge(
                config.model.source,
                config.model.name,
                deadline_s=config.deadline_s,
                api_key=_variable("model.key_env", key) if key else "",
            )
            stack.callback(judge.close)
        yield WeightedRubric(config, functions, judge)


def _variable(setting: str, name: str) -> str:
    if name not in os.environ:
        raise ValueError(
            f"reward.{setting}: the environment variable {name} is not set, expected a value; "
            "probable cause: a mistyped name, or a run started from another shell"
        )
    return os.environ[name]
