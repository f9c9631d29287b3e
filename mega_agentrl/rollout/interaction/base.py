"""Simulated users and environments, and the yaml file that configures them.

An interaction receives every assistant message without a tool call and answers it, rewards it or
ends the conversation. One object serves all trajectories; per-trajectory data lives in the *state*
that `create` returns.

To add one:

1. Write a subclass of `Interaction` with a `respond` method (example: `interaction.gsm8k`).
2. If it has a state, write `create` and `fork`; if it has a final reward, `calc_reward`.
3. List the class in the yaml file of `rollout.interaction_config_file`.
4. Test it as `tests/rollout/interaction/test_interaction_gsm8k.py` does.

The yaml file::

    - name: gsm8k                                   # default: the class attribute
      class_name: mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction    # or users.py:Mine
      config: {}                                    # keyword arguments of the class
      timeout_s: 5                                  # per method call; default: the class attribute
      max_turns: 3                                  # messages per trajectory; default: likewise

A prompt uses an interaction if its `extra_info` has `interaction_kwargs`: `name` selects the
interaction (required only if the file lists several), all other keys are passed to `create`.
Trajectories whose interaction has a state but no `fork` method do not branch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mega_agentrl.tool.user_tools import import_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.types.records import Message

_ENTRY_KEYS = ("name", "class_name", "config", "timeout_s", "max_turns")


@dataclass(slots=True, kw_only=True, frozen=True)
class Reply:
    """The answer of an interaction to one assistant message."""

    text: str = ""
    """Message to the assistant; not shown if `is_last` is set."""
    is_last: bool = False
    """Whether the conversation ends here."""
    reward: float = 0.0
    """Reward for the assistant message; summed per trajectory under the interaction's name."""


class Interaction(ABC):
    """Base class of a simulated user or environment."""

    name: str
    """Unique among interactions and tools; rewards are reported under it."""
    timeout_s: float = 60.0
    """Hard limit of every method call."""
    max_turns: int = 4
    """Maximum number of messages it sends in one trajectory."""

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` for invalid kwargs of a prompt; called before the run starts."""
        return

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the state of a new trajectory; `kwargs` are the prompt's without `name`."""
        return None

    @abstractmethod
    async def respond(self, state: Any, messages: Sequence[Message]) -> Reply:
        """Answer the last message, which is the assistant's.

        An exception fails the trajectory as an infrastructure error, not as the policy's fault.
        """

    async def fork(self, state: Any) -> Any:
        """Return an independent copy of the state."""
        raise TypeError(f"interaction {self.name} has a state and no fork")

    async def calc_reward(self, state: Any) -> float | None:
        """Return the final reward of the trajectory, or None if there is none."""
        return None

    async def release(self, state: Any) -> None:
        """Free the resources of the state."""
        return

    def can_fork(self, state: Any) -> bool:
        """Return whether trajectories with this state may branch."""
        return state is None or type(self).fork is not Interaction.fork


def load_interactions(path: str | Path) -> list[Interaction]:
    """Load the interactions of a yaml file, in order; raise `ValueError` if it is invalid."""
    path = Path(path)
    key = f"rollout.interaction_config_file={path}"
    if not path.is_file():
        raise ValueError(f"{key}: there is no such file; expected a yaml list of interactions")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}: it is no yaml: {error}") from error
    if isinstance(entries, dict) and set(entries) == {"interaction"}:
        entries = entries["interaction"]  # verl's file format
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{key}: got {type(entries).__name__}, expected a non-empty list; probable cause: the "
            "dash before an entry is missing"
        )
    loaded = [
        _load_entry(entry, path, f"{key}, entry {number}")
        for number, entry in enumerate(entries, 1)
    ]
    names = [interaction.name for interaction in loaded]
    if len(set(names)) != len(names):
        raise ValueError(f"{key}: names {names}, expected each name once")
    return loaded


def _load_entry(entry: Any, path: Path, where: str) -> Interaction:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{where}: got {entry!r}, expected a mapping with class_name")  # noqa: TRY004
    if unknown := sorted(set(map(str, entry)) - set(_ENTRY_KEYS)):
        raise ValueError(
            f"{where}: unknown keys {unknown}, expected some of {', '.join(_ENTRY_KEYS)}"
        )
    interaction = _instantiate(entry, path, where)
    limits = (("timeout_s", (int, float)), ("max_turns", (int,)))
    for key, kinds in limits:
        if key not in entry:
            continue
        value = entry[key]
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            number = "whole number" if kinds == (int,) else "number of seconds"
            raise ValueError(f"{where}, {key}={value!r}: expected a {number} above 0")
        setattr(interaction, key, value)
    name = entry.get("name", getattr(interaction, "name", None))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name is {name!r}, expected a text here or in the class")
    interaction.name = name
    return interaction


def _instantiate(entry: Mapping[str, Any], path: Path, where: str) -> Interaction:
    found, config = import_object(entry["class_name"], path, where), entry.get("config") or {}
    if not (isinstance(found, type) and issubclass(found, Interaction)):
        raise ValueError(  # noqa: TRY004
            f"{where}: {found!r} is no interaction, expected a class derived from "
            "mega_agentrl.rollout.interaction.base.Interaction"
        )
    if inspect.isabstract(found):
        missing = sorted(found.__abstractmethods__)
        raise ValueError(f"{where}: {found.__name__} lacks the methods {missing}")
    if not isinstance(config, dict):
        raise ValueError(f"{where}, config: got {config!r}, expected a mapping")  # noqa: TRY004
    try:
        inspect.signature(found).bind(**config)
        return found(**config)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"{where}, config: {found.__name__} cannot be made of {config}: "
            f"{type(error).__name__}: {error}"
        ) from error
