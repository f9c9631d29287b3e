"""The interface between a rollout and an agent, which runs once per attempt."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Message, Prompt

AgentResult = float | Mapping[str, float] | None
"""Result of an attempt: its reward, several parts of the reward by name, or None."""

AGENT_PART = "agent"
"""Name of the reward part that an agent returns; further parts are `agent.NAME`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentTask:
    """One attempt at a prompt, as the agent gets it. The agent may change what it gets."""

    prompt: list[Message]
    """The messages of the prompt, with images as parts `image_url`."""
    base_url: str
    """Address of the OpenAI APIs, ending in `/v1`."""
    api_key: str
    """Key of the session."""
    socket_path: Path
    """Unix socket of the gateway, for agents without a network."""
    attempt_id: str
    """Name of the attempt, unique within the run."""
    attempt: int
    """Number of the attempt in the group, from 0. A fork repeats its root, and has its number."""
    data_source: str = ""
    """The row's data source."""
    ground_truth: Any = None
    """The row's `reward_model.ground_truth`. The policy must not see it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The row's arguments of tools."""

    @property
    def environment_kwargs(self) -> Mapping[str, Any]:
        """The row's `extra_info.environment_kwargs`."""
        return self.extra_info.get("environment_kwargs") or {}

    @property
    def seed(self) -> int:
        """Seed of the row: its `environment_kwargs.seed`, else a hash of it.

        All attempts at a prompt start from the same state, which the comparison within a group
        needs, and a fork finds what its parent found.

        Raises:
            InputError: the row's seed is no integer.
        """
        seed = self.environment_kwargs.get("seed")
        if seed is None:
            row = json.dumps([self.prompt, self.environment_kwargs], sort_keys=True, default=str)
            return int.from_bytes(hashlib.sha256(row.encode()).digest()[:4], "big") >> 1
        try:
            return int(seed)
        except (TypeError, ValueError) as error:
            name = "extra_info.environment_kwargs.seed"
            raise InputError(name, seed, "an integer", "a column of another type") from error


class Agent(Protocol):
    """Runs attempts: `function.FunctionAgent`, `command.CommandAgent` or a class of the user."""

    @property
    def name(self) -> str:
        """Place of the agent's code, for messages."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Run one attempt and return its reward, or several parts by name, or None.

        It runs on the event loop of the agents. Cancellation ends everything that the attempt has
        started. An exception is a failed attempt, unless the policy causes it (`policy_errors`).
        """


def prompt_messages(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt as OpenAI's API has them."""
    return [{**message, "content": _api_content(message["content"])} for message in prompt.messages]


def _api_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_api_part(part) for part in content]


def _api_part(part: Mapping[str, Any]) -> dict[str, Any]:
    image = part.get("image")
    if not isinstance(image, ImageInput):
        return dict(part)
    data = image.read()
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class PolicyError(Exception):
    """The policy has written something with which the agent cannot go on.

    Raised by an agent, it ends the attempt, which is scored like any other.

    Args:
        message: What was wrong, for the records.
        result: What the agent would have returned; None gives no part of the reward.
    """

    def __init__(self, message: str = "", result: AgentResult = None) -> None:
        super().__init__(message)
        self.result = result


class AgentCommandError(RuntimeError):
    """The command of an attempt has failed.

    Attributes:
        class_name: Module and name of the exception that ended it; empty if it is not known.
    """

    def __init__(self, message: str, class_name: str = "") -> None:
        super().__init__(message)
        self.class_name = class_name


class EnvironmentFailedError(RuntimeError):
    """The environment of an attempt has failed, which the policy cannot have caused.

    Unlike after other errors of an agent, the attempt has failed even if a limit was reached.
    """


class AgentResultError(ValueError):
    """An agent returned something that is not a reward."""


def agent_part_names(config: RewardConfig) -> list[str]:
    """Return the names of the rubrics' parts that the agent returns."""
    return [
        name
        for name in config.part_names
        if name == AGENT_PART or name.startswith(f"{AGENT_PART}.")
    ]


def reward_parts(result: Any) -> dict[str, float]:
    """Return what an agent returned as reward parts by name.

    Raises:
        AgentResultError: it is neither a finite number, nor a mapping of such, nor None.
    """
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        return {AGENT_PART: _finite_number(result, "the agent's result")}
    return {
        f"{AGENT_PART}.{name}": _finite_number(value, f"the agent's result[{name!r}]")
        for name, value in result.items()
    }


def _finite_number(value: Any, key: str) -> float:
    try:
        number = float(value)
    except OverflowError as error:  # an integer, too long to be shown
        raise AgentResultError(f"{key}: got an integer beyond the range of floats") from error
    except (TypeError, ValueError) as error:
        raise AgentResultError(f"{key}: got {value!r}, expected a number or None") from error
    if isinstance(value, str) or not math.isfinite(number):
        raise AgentResultError(f"{key}: got {value!r}, expected a finite number")
    return number
