"""An agent that is a command of any language, in a sandbox whose only network is the gateway.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.command.CommandAgent
        command: [node, agent.js]
        working_folder: /home/me/agent

Each attempt is a process. It reads a JSON object with `prompt` (messages) and `tools_kwargs` from
its standard input, and finds the gateway in the environment variables that SDKs read:
`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. Exit code 0 means
that the attempt has ended. With `reads_reward`, the last line of its standard output is its reward,
a JSON number or an object of parts; set it only if nothing that the policy wrote can be that line.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.rollout.agents.base import AgentResultError
from mega_agentrl.sandbox.command import SandboxedCommand, start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.rollout.agents.base import AgentResult, AgentTask
    from mega_agentrl.sandbox.command import SandboxedProcess

GATEWAY_PORT = 8080
"""Port of the gateway on the loopback interface of the sandbox."""

_KEY = "rollout.agent"
_MAX_LINE_BYTES = 1 << 20


class AgentCommandError(RuntimeError):
    """The command of an attempt has failed."""


class CommandAgent:
    """Starts a command for each attempt.

    Args:
        command: Program and arguments.
        environment: Its environment variables, in addition to those of the gateway.
        working_folder: Folder that it starts in and may read; empty for an empty one.
        read_only: Further files and folders that it may read.
        network: `none` has the gateway only, `host` also the network of this node.
        isolation: `none` runs a trusted command without a sandbox.
        memory_limit_mib: Memory of each of its processes.
        reads_reward: Whether the last line of its standard output is its reward.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        working_folder: str = "",
        read_only: Sequence[str] = (),
        network: str = "none",
        isolation: str = "bubblewrap",
        memory_limit_mib: int = 2048,
        reads_reward: bool = False,
    ) -> None:
        is_words = not isinstance(command, str) and all(isinstance(word, str) for word in command)
        check_range(
            is_words and bool(command),
            f"{_KEY}.command",
            command,
            "a list of the program and its arguments",
        )
        self.name = " ".join(command)
        folder = Path(working_folder).absolute() if working_folder else None
        folders = [Path(path).absolute() for path in read_only] + ([folder] if folder else [])
        for path in folders:
            check_range(path.exists(), f"{_KEY}.read_only", str(path), "an existing file or folder")
        self._arguments: dict[str, Any] = {
            "command": tuple(command),
            "read_only": tuple(folders),
            "memory_limit_mib": memory_limit_mib,
            "isolation": _choice(SandboxIsolation, isolation, "isolation"),
            "network": _choice(NetworkAccess, network, "network"),
        }
        if folder is not None:
            self._arguments["working_folder"] = folder
        self._environment = dict(environment or {})
        self._reads_reward = reads_reward

    async def run(self, task: AgentTask) -> AgentResult:
        """Run the command to its end; cancellation kills everything that it started.

        Raises:
            AgentCommandError: it ended with another code than 0.
            AgentResultError: its last line is not a reward.
            RuntimeError: it could not be started.
        """
        process = await start(self._command(task), max_line_bytes=_MAX_LINE_BYTES)
        try:
            last_line, _ = await asyncio.gather(_read_last_line(process), _send(process, task))
            code = await process.wait()
        finally:
            await process.kill()
        if code != 0:
            raise AgentCommandError(f"{self.name}: exit code {code}{process.stderr_note()}")
        return _parse_reward(last_line) if self._reads_reward else None

    def _command(self, task: AgentTask) -> SandboxedCommand:
        arguments = dict(self._arguments)
        url = task.base_url.removesuffix("/v1")
        isolated = self._arguments["isolation"] is not SandboxIsolation.none
        if isolated and self._arguments["network"] is NetworkAccess.none:
            url = f"http://127.0.0.1:{GATEWAY_PORT}"
            arguments["forwarded_ports"] = {GATEWAY_PORT: task.socket_path}
        environment = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": task.api_key,
            **self._environment,
        }
        return SandboxedCommand(environment=environment, **arguments)


def _choice(choices: Any, value: str, name: str) -> Any:
    known = [str(choice) for choice in choices]
    if value not in known:
        raise ConfigError(f"{_KEY}.{name}", value, f"one of {', '.join(known)}", "a misspelt value")
    return choices(value)


async def _send(process: SandboxedProcess, task: AgentTask) -> None:
    """Write the prompt; a command need not read it."""
    body = {"prompt": task.prompt, "tools_kwargs": task.tools_kwargs}
    try:
        process.stdin.write(json.dumps(body).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return
    finally:
        process.stdin.close()


async def _read_last_line(process: SandboxedProcess) -> bytes:
    """Read the standard output to its end; its length is not bounded, what is kept is."""
    tail = bytearray()
    while chunk := await process.stdout.read(_MAX_LINE_BYTES):
        tail += chunk
        if len(tail) > 2 * _MAX_LINE_BYTES:  # cut rarely, because it copies
            del tail[:-_MAX_LINE_BYTES]
    return bytes(tail).rstrip().rpartition(b"\n")[2]


def _parse_reward(line: bytes) -> AgentResult:
    try:
        reward: AgentResult = json.loads(line)
    except ValueError as error:
        raise AgentResultError(
            f"the last line of the output: got {line[:200]!r}, expected a JSON number or object"
        ) from error
    return reward
