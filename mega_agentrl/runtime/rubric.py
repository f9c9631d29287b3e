"""The rubric of a run with the worker processes and the judge client that it needs.

API keys and other environment variables are read here. A reward model in a folder is not part of
the rubric but a group of ranks (`workers.auxiliary_groups`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.config.sections.reward import FUNCTION_EXPECTED, MODEL_PART
from mega_agentrl.reward.llm_judge import JudgePrompt, LLMJudge
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.reward.user_reward import FIND_PROBLEM, UserRewardFunction, warm_up_call
from mega_agentrl.sandbox.worker_pool import WorkerCallError, WorkerPool
from mega_agentrl.types.first_calls import FirstCalls

if TYPE_CHECKING:
    from mega_agentrl.config.sections.reward import RewardConfig


_IMPORT_TIMEOUT_S = 120.0
"""Timeout in seconds for importing a module with a reward function."""


def check_reward_environment(config: RewardConfig) -> None:
    """Raise `ConfigError` if an environment variable that the reward needs is not set."""
    for name in config.worker_env_vars:
        _require_env("worker_env_vars", name)
    if MODEL_PART in config.part_names and config.model.is_remote and config.model.api_key_env:
        _require_env("model.api_key_env", config.model.api_key_env)


def check_reward_functions(config: RewardConfig) -> None:
    """Load the user's functions in a worker process, as the rubric's processes will.

    Raises:
        ConfigError: A function cannot be loaded or called, or an environment variable is missing.
    """
    if not config.functions:
        return
    pool = WorkerPool(1, _IMPORT_TIMEOUT_S, environment=_worker_environment(config))
    with closing(pool):
        pool.start()
        for name, path in config.functions.items():
            try:
                cause = pool.submit(FIND_PROBLEM, {"path": path}).result()
            except WorkerCallError as error:  # the module ended the process, or takes too long
                cause = str(error).removeprefix(f"{FIND_PROBLEM}: ")
            if cause:
                raise ConfigError(f"reward.functions.{name}", path, FUNCTION_EXPECTED, cause)


def _worker_environment(config: RewardConfig) -> dict[str, str]:
    return {name: _require_env("worker_env_vars", name) for name in config.worker_env_vars}


@contextmanager
def open_rubric(
    config: RewardConfig, *, max_failed_first_calls: int = 0
) -> Iterator[WeightedRubric]:
    """Open the rubric; its processes are ended on exit.

    Args:
        config: Section `reward`.
        max_failed_first_calls: Number of first calls of a user function, of which at least one must
            succeed; 0 turns the check off.

    Raises:
        ConfigError: An environment variable is missing.
    """
    with ExitStack() as stack:
        functions: dict[str, UserRewardFunction] = {}
        paths = {name: path for name, path in config.functions.items() if name in config.part_names}
        if paths:
            pool = WorkerPool(
                config.num_workers,
                config.timeout_s,
                warm_up=[warm_up_call(path) for path in paths.values()],
                environment=_worker_environment(config),
            )
            stack.callback(pool.close)
            pool.start()
            functions = {
                name: UserRewardFunction(
                    pool, path, FirstCalls(f"reward function {name}", path, max_failed_first_calls)
                )
                for name, path in paths.items()
            }
        judge = None
        if MODEL_PART in config.part_names and config.model.is_remote:
            key = config.model.api_key_env
            judge = LLMJudge(
                config.model.path_or_url,
                config.model.served_model_name,
                timeout_s=config.timeout_s,
                api_key=_require_env("model.api_key_env", key) if key else "",
                prompt=_read_judge_prompt(config),
            )
            stack.callback(judge.close)
        yield WeightedRubric(config, functions, judge)


def _read_judge_prompt(config: RewardConfig) -> JudgePrompt:
    path = config.model.prompt_file
    if not path:
        return JudgePrompt()
    with reading("reward.model.prompt_file", path, "a text file with a Jinja template"):
        return JudgePrompt(Path(path).read_text(encoding="utf-8"), path)


def _require_env(setting: str, name: str) -> str:
    if name not in os.environ:
        raise ConfigError(
            f"reward.{setting}",
            name,
            "an environment variable that is set",
            "a mistyped name, or a run started from another shell",
        )
    return os.environ[name]
