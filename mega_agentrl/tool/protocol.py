"""What a tool is: subclass `Tool`, give it a name, implement `execute`.

One `Tool` object serves every trajectory; what it keeps for one of them is the *state* that
`create` returns and every other method gets. Its kwargs come from the prompt's
`tools_kwargs[name]`: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`,
`release_kwargs`. The session (`session`) keeps deadlines and limits and types what goes wrong.

Example, a tool with a memory::

    class Notes(Tool):
        name = "notes"
        description = "Keeps a note."
        argument = "text"

        async def create(self, kwargs):
            return []

        async def execute(self, state, arguments, kwargs):
            state.append(arguments["text"])
            return ToolAnswer(text=f"{len(state)} notes")

        async def fork(self, state):
            return list(state)

A function of plain values is a tool with one decorator, see `function`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolAnswer:
    """What one execution gives back; `text` is shown to the policy."""

    text: str
    status: ToolStatus = ToolStatus.ok
    step_reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tool(ABC):
    """One tool of the run.

    name: unique; also its tag in the tag protocol. description: for the policy. argument: the
    argument that takes the text of a tag. parameters: JSON schema of all arguments; None: one
    text under `argument`. deadline_s: hard limit of one execution kept by the session; None
    for a tool that keeps its own. max_concurrent: executions at once in this process, None for
    no limit; waiting for one's turn does not count against the deadline.
    """

    name: str
    description: str = ""
    argument: str
    parameters: Mapping[str, Any] | None = None
    deadline_s: float | None = 60.0
    max_concurrent: int | None = None

    def schema(self) -> dict[str, Any]:
        """The OpenAI-style function schema."""
        parameters = self.parameters
        if parameters is None:
            parameters = {
                "type": "object",
                "properties": {self.argument: {"type": "string"}},
                "required": [self.argument],
                "additionalProperties": False,
            }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(parameters),
        }
        return {"type": "function", "function": function}

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise `ValueError` for a prompt's kwargs that cannot work, before the run starts.

        kwargs: `create_kwargs`, `execute_kwargs`, ... as far as the prompt gives them.
        """
        return

    async def start(self) -> None:
        """Get ready, once per run, before the first `create`."""
        return

    async def close(self) -> None:
        """Free what `start` made; safe to call twice."""
        return

    def close_now(self) -> None:
        """`close` for synchronous code: end child processes at once."""
        return

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """State of a new trajectory. kwargs: its `create_kwargs`.

        Here as in `fork`: when cancelled, free what was made before; a state that is returned
        nevertheless is released.
        """
        return None

    @abstractmethod
    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Run one call whose arguments fit the schema.

        Raises `ValueError` for arguments the policy got wrong (it sees the message);
        anything else that is raised counts as our fault. Past the deadline it is cancelled, and
        left behind where it does not end; the state must stay fit for the next call.
        """

    async def fork(self, state: Any) -> Any:
        """A copy of the state that diverges from here on; the state itself where it is shared
        on purpose (a tool without a memory)."""
        return state

    async def calc_reward(self, state: Any, kwargs: Mapping[str, Any]) -> float | None:
        """Final reward of the trajectory, None where the tool gives none."""
        return None

    async def release(self, state: Any, kwargs: Mapping[str, Any]) -> None:
        """Free the state."""
        return
