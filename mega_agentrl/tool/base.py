"""The base class of tools: subclass `Tool`, set its attributes and implement `execute`.

One `Tool` object serves every trajectory. What belongs to one trajectory is its *state*, which
`create` returns and every other method receives. The methods' kwargs come from the prompt's
`tools_kwargs[name]`: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`.
The session (`session`) enforces deadlines and limits and classifies errors.

Example, a tool with a memory::

    class Notes(Tool):
        name = "notes"
        description = "Keeps a note."
        text_argument = "text"

        async def create(self, kwargs):
            return []

        async def execute(self, state, arguments, kwargs):
            if not arguments["text"]:
                raise ToolInputError("a note has a text")
            state.append(arguments["text"])
            return ToolResponse(text=f"{len(state)} notes")

        async def fork(self, state):
            return list(state)

The decorator of `function` makes a plain function a tool. `user_tools` loads both from a yaml file.

To add a tool to a run: subclass `Tool`, or decorate a function, and name it in the yaml file of
`tool.user_tools_file`. To add a built-in tool, add a section to `config/sections/tools.py`, a line
to `toolkit.build_toolkit` and a test like `tests/tool/test_python_tool.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ToolInputError(ValueError):
    """The policy asked for something that cannot be done; it reads the message and goes on.

    Raise it where the arguments of a call are at fault, and only there. Any other exception of a
    tool is a failure of the tool, which masks the trajectory: a `ValueError` may as well come from
    the answer of a broken service, since those of `json`, of Unicode and of pydantic are.
    """


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolResponse:
    """The result of one execution."""

    text: str
    """Text shown to the policy."""
    status: ToolStatus = ToolStatus.ok
    step_reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the tool reports."""
    images: tuple[bytes, ...] = ()
    """Image files, which a vision-language model sees before the text."""


class Tool(ABC):
    """Base class of the tools of a run."""

    name: str
    """Unique name; also the tool's tag in the tag protocol."""
    description: str = ""
    """Description for the policy."""
    text_argument: str
    """The argument that receives the text of a tag."""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of all arguments; None for one text, `text_argument`."""
    reads_images: bool = False
    """Whether the kwargs of `execute` have the images of the conversation, in the order in which
    the policy was shown them, under the key `images` (a tuple of `types.images.ImageInput`).
    """
    timeout_s: float | None = 60.0
    """Hard limit of one execution, enforced by the session; None for a tool that enforces its own.
    """
    lifecycle_timeout_s: float | None = None
    """Limit of one `create`, `fork`, `calc_reward` or `release`; None for that of the session."""
    max_concurrent: int | None = None
    """Concurrent executions in this process, None for no limit; the wait does not count as run
    time.
    """
    declared_in: str = ""
    """Where the tool is declared, for messages; empty for the file of its class."""
    state_group: object | None = None
    """Tools with the same group share one state in a trajectory, and their calls take turns. The
    first of them creates, copies and releases the state, with the kwargs of all.
    """
    takes_turns: bool = True
    """Whether calls of a trajectory that have a state take turns."""

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI-style function schema."""
        parameters = self.parameters
        if parameters is None:
            parameters = {
                "type": "object",
                "properties": {self.text_argument: {"type": "string"}},
                "required": [self.text_argument],
                "additionalProperties": False,
            }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(parameters),
        }
        return {"type": "function", "function": function}

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise `ValueError` for kwargs of a prompt that cannot work, before the run starts.

        Args:
            kwargs: the prompt's `create_kwargs`, `execute_kwargs`, ..., as far as it sets them.
        """
        return

    async def start(self) -> None:
        """Prepare the tool, once per run, before the first `create`."""
        return

    async def close(self) -> None:
        """Release what `start` acquired; by default `close_now`. Safe to call twice."""
        self.close_now()

    def close_now(self) -> None:
        """Close without an event loop: end child processes at once."""
        return

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the state of a new trajectory.

        When `create` or `fork` is cancelled, it must release what it has acquired; a state that is
        returned nevertheless is released.

        Args:
            kwargs: the prompt's `create_kwargs`.
        """
        return None

    @abstractmethod
    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Run one call whose arguments fit the schema.

        A call that exceeds its timeout is cancelled, and abandoned if it does not end; the state
        must remain usable for the next call.

        Raises:
            ToolInputError: the policy got the arguments wrong; it sees the message. Any other
                exception counts as an infrastructure error.
        """

    async def fork(self, state: Any) -> Any:
        """Return a copy of the state that diverges from here on.

        A tool without a memory may return the state itself.
        """
        return state

    async def calc_reward(self, state: Any, kwargs: Mapping[str, Any]) -> float | None:
        """Return the final reward of the trajectory, or None if the tool gives none."""
        return None

    async def release(self, state: Any, kwargs: Mapping[str, Any]) -> None:
        """Release the state."""
        return


class ToolSet(ABC):
    """Several tools that one entry of `tool.user_tools_file` makes."""

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """Return the tools, each with a name of its own."""
