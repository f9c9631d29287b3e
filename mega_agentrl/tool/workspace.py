"""The tools `bash` and `edit`, which act on one workspace per trajectory.

The workspace (`sandbox.workspace`) is the state that both tools share. It is forked when the
trajectory is. A command that fails is an error of the policy, as for the Python tool. The answer is
what the command has written to stdout and stderr.

The reward command decides whether the work is done: exit code 0 gives the reward 1.0, any other one
or a timeout 0.0. It runs in a new shell, after all other processes of the workspace have been
ended. A workspace that the policy has lost (`sandbox.session`) gives 0.0. If it is lost otherwise,
or the setup command of a new one fails, the trajectory counts as failed.

With the tag protocol the text of a `bash` call is the command, and that of an `edit` call a JSON
object::

    <edit>{"command": "replace", "path": "sum.py", "old": "a - b", "new": "a + b"}</edit>
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.workspace.pool import WorkspacePool
from mega_agentrl.tool.base import Tool, ToolInputError, ToolResponse, ToolSet
from mega_agentrl.tool.function_schema import ALL_ARGUMENTS_AS_JSON
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.sections.tools import WorkspaceToolConfig
    from mega_agentrl.sandbox.client import SandboxResult
    from mega_agentrl.sandbox.workspace.pool import WorkspaceSession

EMPTY_OUTPUT_MESSAGE = "[no output]"

_LIFECYCLE_GRACE_S = 600.0
"""Time to open, fork and release a workspace, on top of the setup or reward command.

It includes the wait for a worker, and for a call that the pool gives up itself: no policy can keep
the workers so busy, or its own workspace, that the reward of a trajectory is a failure instead.
"""

_COMMAND_KEYS = ("setup_command", "reward_command")
_NEEDED_ARGUMENTS = {"view": (), "create": ("text",), "replace": ("old", "new")}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceState:
    """The state of a trajectory."""

    session: WorkspaceSession
    reward_command: str
    """Empty for no reward."""


class WorkspaceTool(Tool):
    """What both tools have in common.

    Args:
        config: section `tool.workspace`.
        pool: the workspaces of both tools.
    """

    timeout_s = None

    def __init__(self, config: WorkspaceToolConfig, pool: WorkspacePool) -> None:
        self._config = config
        self._pool = pool
        self.state_group = pool
        self.lifecycle_timeout_s = config.reward_timeout_s + _LIFECYCLE_GRACE_S

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise `InputError` for `create_kwargs` other than the two commands."""
        for key, value in kwargs.get("create_kwargs", {}).items():
            if key not in _COMMAND_KEYS or not isinstance(value, str | None):
                expected = f"texts named {' and '.join(_COMMAND_KEYS)}"
                raise InputError(f"create_kwargs of {self.name}", {key: value}, expected)

    async def create(self, kwargs: Mapping[str, Any]) -> WorkspaceState:
        """Open the trajectory's workspace and run the setup command in it.

        Raises:
            RuntimeError: no workspace can be opened, or the setup command fails.
        """
        setup = kwargs.get("setup_command") or self._config.setup_command
        reward_command = kwargs.get("reward_command") or self._config.reward_command
        session = await self._pool.open()
        try:
            timeout_s = self._config.reward_timeout_s
            result = await session.set_up(setup, timeout_s) if setup else None
        except BaseException:
            session.close_now()
            raise
        if result is not None and result.status is not ToolStatus.ok:
            session.close_now()
            raise RuntimeError(f"the setup command {setup!r:.200} failed: {result.output}")
        return WorkspaceState(session=session, reward_command=reward_command)

    async def fork(self, state: WorkspaceState) -> WorkspaceState:
        """Fork the workspace; raises `RuntimeError` if that fails."""
        session = await state.session.fork()
        return WorkspaceState(session=session, reward_command=state.reward_command)

    async def calc_reward(self, state: WorkspaceState, kwargs: Mapping[str, Any]) -> float | None:
        """Return the reward of the reward command; raises `RuntimeError` if it cannot run."""
        if not state.reward_command:
            return None
        timeout_s = self._config.reward_timeout_s
        result = await state.session.run_clean(state.reward_command, timeout_s)
        if result.status is ToolStatus.infra_error:
            raise RuntimeError(f"the reward command could not run: {result.output}")
        return float(result.status is ToolStatus.ok)

    async def release(self, state: WorkspaceState, kwargs: Mapping[str, Any]) -> None:
        """End the workspace."""
        await state.session.close()


class BashTool(WorkspaceTool):
    """Runs a command in the shell of the workspace; starts and closes the pool of both tools."""

    name = "bash"
    description = (
        "Runs a command in a bash shell in /workspace. Working folder, variables, functions and "
        "files persist between calls. There is no network."
    )
    text_argument = "command"

    async def start(self) -> None:
        """Start the sandboxes; raises `ValueError` if workspaces cannot run here."""
        await self._pool.start()

    async def close(self) -> None:
        """End all workspaces."""
        await self._pool.close()

    def close_now(self) -> None:
        """Close without an event loop."""
        self._pool.close_now()

    async def execute(
        self, state: WorkspaceState, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Run `arguments["command"]`; `kwargs["timeout_s"]` overrides the configured timeout."""
        command = str(arguments["command"])
        if "\0" in command:
            raise ToolInputError("A command cannot contain the character NUL.")
        command = command.encode("utf-8", "replace").decode()
        return _to_response(await state.session.run(command, kwargs.get("timeout_s")))


class EditTool(WorkspaceTool):
    """Views and changes a text file of the workspace."""

    name = "edit"
    description = (
        "Views (view), writes (create) or changes (replace) a text file. replace puts `new` in "
        "place of `old`, which must occur exactly once. Relative paths start at /workspace."
    )
    text_argument = ALL_ARGUMENTS_AS_JSON
    parameters = {  # noqa: RUF012  as in the base class
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": list(_NEEDED_ARGUMENTS)},
            "path": {"type": "string", "minLength": 1},
            "text": {"type": "string", "description": "create: the whole text of the file."},
            "old": {"type": "string", "minLength": 1, "description": "replace: the exact text."},
            "new": {"type": "string", "description": "replace: the text in its place."},
            "first_line": {"type": "integer", "minimum": 1, "description": "view: from 1."},
            "last_line": {"type": "integer", "minimum": 1, "description": "view: inclusive."},
        },
        "required": ["command", "path"],
        "additionalProperties": False,
    }

    async def execute(
        self, state: WorkspaceState, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Carry out the request in the workspace."""
        command = arguments["command"]
        missing = [name for name in _NEEDED_ARGUMENTS[command] if name not in arguments]
        if missing:
            raise ToolInputError(f"{command} needs {' and '.join(missing)}.")
        if any("\0" in value for value in arguments.values() if isinstance(value, str)):
            raise ToolInputError("A text file cannot contain the character NUL.")
        request = json.dumps(dict(arguments))
        return _to_response(await state.session.edit(request, kwargs.get("timeout_s")))


class WorkspaceTools(ToolSet):
    """Both tools over one pool of workspaces; `config` is the section `tool.workspace`."""

    def __init__(self, config: WorkspaceToolConfig) -> None:
        pool = WorkspacePool(config)
        self._tools = (BashTool(config, pool), EditTool(config, pool))

    def tools(self) -> Sequence[Tool]:
        """Return the two tools."""
        return self._tools


def _to_response(result: SandboxResult) -> ToolResponse:
    return ToolResponse(
        text=result.output or EMPTY_OUTPUT_MESSAGE,
        status=result.status,
        metrics={"run_s": result.latency_s, "oom_kills": float(result.num_oom_kills)},
    )
