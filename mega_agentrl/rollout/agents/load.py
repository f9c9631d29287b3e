"""Reads `rollout.agent`: the block that names the agent, as Hydra's users write it.

::

    rollout:
      agent:
        _target_: my_agent.py:run    # a function, or a class with a method `run`
        timeout_s: 300               # of one attempt
        gateway: {host: 127.0.0.1}   # see `gateway.settings.GatewaySettings`
        temperature_hint: low        # any other key is an argument of the function or class
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.ranges import MAX_TIMEOUT_S
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.rollout.agents.base import LoadedAgent
from mega_agentrl.rollout.agents.function import FunctionAgent
from mega_agentrl.rollout.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from mega_agentrl.rollout.agents.base import Agent

KEY = "rollout.agent"
DEFAULT_TIMEOUT_S = 600.0
_EXPECTED = "a function `run(prompt, base_url, api_key, tools_kwargs)`, or a class with `run(task)`"


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
    timeout_s = options.pop("timeout_s", DEFAULT_TIMEOUT_S)
    is_time = isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_TIMEOUT_S
    check_range(
        is_time, f"{KEY}.timeout_s", timeout_s, f"a number of seconds up to {MAX_TIMEOUT_S}"
    )
    gateway = _gateway_settings(options.pop("gateway", {}))
    loaded = load_user_object(str(target), f"{KEY}._target_", _EXPECTED)
    agent = _make_agent(loaded, options, str(target))
    return LoadedAgent(agent=agent, gateway=gateway, timeout_s=float(timeout_s))


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
