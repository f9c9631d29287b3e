"""Reads `rollout.agent`: the block that names the agent, as Hydra's users write it.

::

    rollout:
      agent:
        _target_: my_agent.py:run    # a function, or a class with a method `run`
        timeout_s: 300               # see `config.sections.agent.AgentConfig`
        gateway: {host: 127.0.0.1}   # see `gateway.settings.GatewaySettings`
        temperature_hint: low        # any other key is an argument of the function or class
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.sections.agent import AgentConfig
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.rollout.agents.command import CommandAgent, default_num_commands
from mega_agentrl.rollout.agents.function import FunctionAgent
from mega_agentrl.rollout.agents.host import LoadedAgent
from mega_agentrl.rollout.agents.policy_errors import PolicyErrors
from mega_agentrl.rollout.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from mega_agentrl.config.sections.rollout import RolloutConfig
    from mega_agentrl.rollout.agents.base import Agent

KEY = "rollout.agent"
DEFAULT_MAX_CONCURRENT = 1024
_EXPECTED = "a function `run(prompt, base_url, api_key, ...)`, or a class with `run(task)`"


def load_agent(block: Mapping[str, Any]) -> LoadedAgent | None:
    """Return the agent of `rollout.agent`; None without one.

    Raises:
        ConfigError: the block is wrong, or the user's code cannot be loaded.
    """
    if not block:
        return None
    options = dict(block)
    target = options.pop("_target_", None)
    check_range(isinstance(target, str), f"{KEY}._target_", target, _EXPECTED)
    names = [spec.name for spec in fields(AgentConfig) if spec.name in options]
    config = AgentConfig(**{name: options.pop(name) for name in names})
    gateway = _gateway_settings(options.pop("gateway", {}))
    loaded = load_user_object(str(target), f"{KEY}._target_", _EXPECTED)
    agent = _make_agent(loaded, options, str(target))
    return LoadedAgent(
        agent=agent,
        gateway=gateway,
        timeout_s=float(config.timeout_s),
        max_concurrent=_max_concurrent(agent, config),
        policy_errors=PolicyErrors(config.policy_errors),
    )


def check_agent_branching(config: RolloutConfig) -> None:
    """Raise a `ConfigError` for a branching rule that never forks the attempts of an agent.

    An agent is forked while it runs; attempts that have ended cannot be continued.
    """
    if not config.agent:
        return
    from mega_agentrl.rollout.branching.policy import make_branch_policy  # imports torch

    if make_branch_policy(config).num_expansion_rounds:
        raise ConfigError(
            "rollout.branching",
            config.branching,
            "a rule that forks while the trajectory runs, such as after_result, with rollout.agent",
            "the rule starts its forks from trajectories that have ended",
        )


def _max_concurrent(agent: Agent, config: AgentConfig) -> int:
    """Return how many attempts may run at once."""
    if not isinstance(agent, CommandAgent):
        return config.max_concurrent or DEFAULT_MAX_CONCURRENT
    chosen, most = config.max_concurrent, agent.max_processes
    check_range(
        chosen is None or chosen <= most,
        f"{KEY}.max_concurrent",
        chosen,
        f"at most {most} commands in sandboxes, each of which has a user id of its own, because "
        "root starts the run",
    )
    return chosen or min(default_num_commands(), most)


def _gateway_settings(block: Any) -> GatewaySettings:
    known = {spec.name: type(spec.default) for spec in fields(GatewaySettings)}
    key = f"{KEY}.gateway"
    check_range(isinstance(block, Mapping), key, block, "a mapping")
    for name, value in block.items():
        check_range(name in known, f"{key}.{name}", value, f"one of {', '.join(known)}")
        kind = known[name]
        check_range(type(value) is kind, f"{key}.{name}", value, f"a value of type {kind.__name__}")
    return GatewaySettings(**block)


def _make_agent(loaded: Any, options: Mapping[str, Any], target: str) -> Agent:
    if inspect.isfunction(loaded):
        return FunctionAgent(loaded, options, f"{KEY}._target_")
    is_class = isinstance(loaded, type) and callable(getattr(loaded, "run", None))
    if not is_class:
        raise ConfigError(f"{KEY}._target_", target, _EXPECTED, f"got {loaded!r}")
    try:
        agent: Agent = loaded(**options)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            KEY,
            dict(options),
            f"arguments with which {loaded.__name__} can be created",
            f"{type(error).__name__}: {error}",
        ) from error
    return agent
