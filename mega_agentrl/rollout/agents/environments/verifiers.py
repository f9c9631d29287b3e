"""Environments of the package verifiers (0.4 and later) as agents, with their rewards and data.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.environments.verifiers.VerifiersAgent
        environment:
          taskset: {id: textarena, game: Hangman-v0}
          player: {harness: {id: "null"}, runtime: {type: subprocess}, max_turns: 10}

`environment` is the block `env` of verifiers' own configuration. Each attempt is an episode of the
task `extra_info.environment_kwargs.index`; `tools/convert_verifiers.py` writes such rows. Every
agent of the environment that has no `client` of its own is the policy.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.converters.source_row import make_rl_row
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.agents.base import EnvironmentFailedError
from mega_agentrl.rollout.agents.daemon_thread import DaemonThread
from mega_agentrl.rollout.agents.environments.episode import KEY, import_package, mapping_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.rollout.agents.base import AgentTask

TOTAL_PART = "reward"
"""Part of the reward that is the weighted sum of the others, `agent.reward` in a rubric."""

_NO_KEY = "MEGA_AGENTRL_UNSET"
"""Environment variable without a value: the URL of the session names it already."""


class VerifiersAgent:
    """Plays tasks of a verifiers environment.

    Args:
        environment: The block `env` of verifiers' configuration.

    Raises:
        ConfigError: verifiers or the environment is not installed, or the block is wrong.
    """

    def __init__(self, *, environment: Mapping[str, Any]) -> None:
        self._api = import_package("verifiers.v1", "'verifiers>=0.4'")
        block = mapping_option(environment, "environment")
        try:
            self._config = self._api.resolve_env_config(block)
            self._taskset = self._api.load_environment(self._config).taskset
        except Exception as error:
            expected = "the block `env` of verifiers' configuration"
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{KEY}.environment", block, expected, cause) from error
        self.name = f"verifiers {self._config.env_id}"
        self._tasks: list[Any] = []
        self._unread_tasks = iter(self._taskset)
        self._reader = DaemonThread("verifiers tasks")

    async def run(self, task: AgentTask) -> dict[str, float]:
        """Play one episode and return its total reward and the parts by name.

        Raises:
            EnvironmentFailedError: The episode has failed, timed out, or was not scored.
        """
        index = task.environment_kwargs.get("index")
        if not isinstance(index, int) or index < 0:
            raise EnvironmentFailedError(
                f"extra_info.environment_kwargs.index: got {index!r}, expected the number of a task"
            )
        root = task.base_url.removesuffix("/v1")
        client = self._api.EvalClientConfig(
            base_url=f"{root}/sessions/{task.api_key}/v1", api_key_var=_NO_KEY
        )
        context = self._api.ModelContext(model="policy", client=client)
        try:
            vf_task = await self._reader.call(partial(self._find_task, index))
            # An environment of its own: it closes its servers, and its client of this session.
            environment = self._api.load_environment(self._config)
            async with environment.serving():
                episode = await environment.run_episode(vf_task, context)
        except (Exception, SystemExit) as error:  # verifiers exits where a login is missing
            raise EnvironmentFailedError(f"{type(error).__name__}: {error}") from error
        return _read_rewards(episode)

    def rl_rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the tasks as rows of our data format, at most `limit`.

        Raises:
            ValueError: The tasks are infinite and there is no limit.
        """
        if limit is None and not self._taskset.bounded:
            raise InputError("--limit", None, "a number", f"{self.name} has no end")
        return [self._rl_row(vf_task) for vf_task in islice(self._taskset, limit)]

    def _rl_row(self, vf_task: Any) -> dict[str, Any]:
        data = vf_task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        text = data.prompt_text or data.description or data.name or f"Task {data.idx}"
        answer = getattr(data, "answer", None)
        return make_rl_row(
            data_source=self._config.env_id,
            messages=[*messages, {"role": "user", "content": text}],
            ground_truth=None if answer is None else str(answer),
            ability="verifiers",
            extra_info={"index": data.idx, "environment_kwargs": {"index": data.idx}},
        )

    def _find_task(self, index: int) -> Any:
        num_missing = index + 1 - len(self._tasks)
        self._tasks += islice(self._unread_tasks, max(0, num_missing))
        return self._tasks[index]


def _read_rewards(episode: Any) -> dict[str, float]:
    """Return the rewards of the policy's traces.

    Raises:
        EnvironmentFailedError: The episode has failed, timed out, or was not scored.
        RuntimeError: The gateway refused a request, after a limit for instance.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        last = errors[-1] if errors else None
        message = f"{last.type}: {last.message}" if last else "the episode is not ok"
        is_refusal = last is not None and last.type == "ProviderError"
        raise (RuntimeError if is_refusal else EnvironmentFailedError)(message)
    if timed_out := [trace.stop_condition for trace in episode.traces if trace.is_timeout]:
        raise EnvironmentFailedError(f"the episode ended by {timed_out[0]}")
    parts: dict[str, float] = {}
    total = 0.0
    for trace in episode.traces:
        if not trace.agent.trainable:
            continue
        for name, reward in trace.rewards.items():
            if reward is None or not math.isfinite(reward.value):
                raise EnvironmentFailedError(f"the reward {name} is {reward}")
            parts[name] = parts.get(name, 0.0) + reward.value
            total += reward.value
    return {**parts, TOTAL_PART: total}
