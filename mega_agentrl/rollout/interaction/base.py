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
      max_turns: 3                                  # per trajectory; default: the class attribute

A prompt uses an interaction if its `extra_info` has `interaction_kwargs`: `name` selects the
interaction (required only if the file lists several), all other keys are passed to `create`.
Trajectories whose interaction has a state but no `fork` method do not branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_entries import read_user_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.user_entries import UserEntry
    from mega_agentrl.types.records import Message

_EXPECTED_CLASS = "a class derived from mega_agentrl.rollout.interaction.base.Interaction"


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
    """Maximum number of messages that the interaction sends in one trajectory."""

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
    key, path = "rollout.interaction_config_file", Path(path)
    extra_keys = ("name", "timeout_s", "max_turns")
    entries = read_user_entries(path, key, extra_keys, head="interaction")  # verl's file format
    loaded = [_make_interaction(entry) for entry in entries]
    names = [interaction.name for interaction in loaded]
    if len(set(names)) != len(names):
        raise ConfigError(f"{key}={path}, names", names, "each name once")
    return loaded


def _make_interaction(entry: UserEntry) -> Interaction:
    user_class = entry.load(_EXPECTED_CLASS)
    interaction: Interaction = entry.construct(user_class, Interaction, _EXPECTED_CLASS)
    if (timeout_s := entry.limit("timeout_s")) is not None:
        interaction.timeout_s = timeout_s
    if (max_turns := entry.limit("max_turns", is_whole=True)) is not None:
        interaction.max_turns = max_turns
    name = entry.values.get("name", getattr(interaction, "name", None))
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{entry.key}, name", name, "a text, in the entry or in the class")
    interaction.name = name
    return interaction
