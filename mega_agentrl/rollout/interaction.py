"""A simulated user or environment: what it is, and how a run gets its own (yaml).

Subclass `Interaction` and implement `respond`; one object serves every trajectory, and what it
keeps for one of them is the *state* that `create` returns. It hears every message of the
assistant that makes no call and answers it, judges it, or ends the conversation.

    - name: gsm8k                                   # default: the class's
      class_name: mega_agentrl.rollout.interaction_gsm8k.Gsm8kUser    # or users.py:Mine
      config: {}                                    # keyword arguments of the class
      timeout_s: 5                                  # of every step; default: the class's
      max_turns: 3                                  # messages to the assistant; default: likewise

A prompt takes part where its `extra_info.interaction_kwargs` say so: `name` chooses (needed only
where the file has several), all other keys go to `create`. A class without `fork` and with a
state is not forked: its trajectories do not branch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mega_agentrl.tool.own import import_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.types.records import Message

_KEYS = ("name", "class_name", "config", "timeout_s", "max_turns")


@dataclass(slots=True, kw_only=True, frozen=True)
class Reply:
    """What the user says. done: nothing more; `text` is then not shown.

    reward: for the message it answers; summed up under the interaction's name.
    """

    text: str = ""
    done: bool = False
    reward: float = 0.0


class Interaction(ABC):
    """One user or environment of the run.

    name: unique, also among the tools: its rewards go by it. deadline_s: hard limit of every
    step. max_turns: messages it may send in one trajectory.
    """

    name: str
    deadline_s: float = 60.0
    max_turns: int = 4

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a prompt's kwargs that cannot work, before the run starts."""
        return

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """State of a new trajectory. kwargs: the prompt's, without `name`."""
        return None

    @abstractmethod
    async def respond(self, state: Any, messages: Sequence[Message]) -> Reply:
        """Answer the last one of the messages, which is the assistant's.

        Whatever is raised counts as our fault and not as the policy's.
        """

    async def fork(self, state: Any) -> Any:
        """A copy of the state that diverges from here on."""
        raise TypeError(f"interaction {self.name} has a state and no fork")

    async def calc_reward(self, state: Any) -> float | None:
        """Final reward of the trajectory, None where there is none."""
        return None

    async def release(self, state: Any) -> None:
        """Free the state."""
        return

    def can_fork(self, state: Any) -> bool:
        """Whether trajectories with this state may branch."""
        return state is None or type(self).fork is not Interaction.fork


def load_interactions(path: str | Path) -> list[Interaction]:
    """Those of the file, in its order; raises `ValueError` for whatever is wrong with it."""
    path = Path(path)
    key = f"rollout.interaction_file={path}"
    if not path.is_file():
        raise ValueError(f"{key}: there is no such file; expected a yaml list of interactions")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}: it is no yaml: {error}") from error
    if isinstance(entries, dict) and set(entries) == {"interaction"}:
        entries = entries["interaction"]  # as verl's files have it
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{key}: got {type(entries).__name__}, expected a non-empty list; probable cause: the "
            "dash before an entry is missing"
        )
    loaded = [
        _load(entry, path, f"{key}, entry {number}") for number, entry in enumerate(entries, 1)
    ]
    names = [interaction.name for interaction in loaded]
    if len(set(names)) != len(names):
        raise ValueError(f"{key}: names {names}, expected each name once")
    return loaded


def _load(entry: Any, path: Path, where: str) -> Interaction:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{where}: got {entry!r}, expected a mapping with class_name")  # noqa: TRY004
    if unknown := sorted(set(map(str, entry)) - set(_KEYS)):
        raise ValueError(f"{where}: unknown keys {unknown}, expected some of {', '.join(_KEYS)}")
    interaction = _make(entry, path, where)
    limits = (("timeout_s", "deadline_s", (int, float)), ("max_turns", "max_turns", (int,)))
    for key, attribute, kinds in limits:
        if key not in entry:
            continue
        value = entry[key]
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            number = "whole number" if kinds == (int,) else "number of seconds"
            raise ValueError(f"{where}, {key}={value!r}: expected a {number} above 0")
        setattr(interaction, attribute, value)
    name = entry.get("name", getattr(interaction, "name", None))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name is {name!r}, expected a text here or in the class")
    interaction.name = name
    return interaction


def _make(entry: Mapping[str, Any], path: Path, where: str) -> Interaction:
    found, config = import_named(entry["class_name"], path, where), entry.get("config") or {}
    if not (isinstance(found, type) and issubclass(found, Interaction)):
        raise ValueError(  # noqa: TRY004
            f"{where}: {found!r} is no interaction, expected a class derived from "
            "mega_agentrl.rollout.interaction.Interaction"
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
