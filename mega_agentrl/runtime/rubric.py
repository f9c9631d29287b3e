"""The rubric of a run with the worker processes and the judge client that it needs.

API keys and other environment variables are read here. A reward model in a folder is not part of
the rubric but a group of ranks (`workers.auxiliary_groups`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mega_agentrl.config.sections.reward import MODEL_PART
from mega_agentrl.reward.llm_judge import LLMJudge
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.reward.user_reward import UserRewardFunction, warm_up_call
from mega_agentrl.sandbox.worker_pool import WorkerPool
from mega_agentrl.types.first_calls import FirstCalls

if TYPE_CHECKING:
    from mega_agentrl.config.sections.reward import RewardConfig


def check_reward_environment(config: RewardConfig) -> None:
    """Raise `ValueError` if an environment variable that the reward needs is not set."""
    for name in config.worker_env_vars:
        _require_env("worker_env_vars", name)
    if MODEL_PART in config.part_names and config.model.is_remote and config.model.api_key_env:
        _require_env("model.api_key_env", config.model.api_key_env)


@contextmanager
def open_rubric(
    config: RewardConfig, *, max_failed_first_calls: int = 0
) -> Iterator[WeightedRubric]:
    """Open the rubric; its processes are ended on exit.

    Args:
        config: Section `reward`.
        max_failed_first_calls: Number of first calls of a user function of which one must succeed;
            0 watches none.

    Raises:
        ValueError: A reward function cannot be loaded or called, or an environment variable is
            missing.
    """
    with ExitStack() as stack:
        functions: dict[str, UserRewardFunction] = {}
        used = {name: path for name, path in config.functions.items() if name in config.part_names}
        if used:
            pool = WorkerPool(
                config.num_workers,
                config.timeout_s,
                warm_up=[warm_up_call(path) for path in used.values()],
                environment={
                    name: _require_env("worker_env_vars", name) for name in config.worker_env_vars
                },
            )
            stack.callback(pool.close)
            pool.start()
            functions = {
                name: UserRewardFunction(
                    pool, path, FirstCalls(f"reward function {name}", path, max_failed_first_calls)
                )
                for name, path in used.items()
            }
        judge = None
        if MODEL_PART in config.part_names and config.model.is_remote:
            key = config.model.api_key_env
            judge = LLMJudge(
                config.model.path_or_url,
                config.model.served_model_name,
                timeout_s=config.timeout_s,
                api_key=_require_env("model.api_key_env", key) if key else "",
            )
            stack.callback(judge.close)
        yield WeightedRubric(config, functions, judge)


def _require_env(setting: str, name: str) -> str:
    if name not in os.environ:
        raise ValueError(
            f"reward.{setting}: the environment variable {name} is not set, expected a value; "
            "probable cause: a mistyped name, or a run started from another shell"
        )
    return os.environ[name]
