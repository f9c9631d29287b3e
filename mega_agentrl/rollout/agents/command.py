"""An agent that is a command of any language, in a sandbox whose only network is the gateway.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.command.CommandAgent
        command: [node, agent.js]
        working_folder: /home/me/agent

Each attempt is a process. It reads a JSON object with the prompt and the row (`TASK_FIELDS`) from
its standard input, and finds the gateway in the environment variables that SDKs read:
`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. Exit code 0 means
that the attempt has ended. With `reads_reward`, the last line of its standard output is its reward,
a JSON number or an object of parts; set it only if nothing that the policy wrote can be that line.

Another exit code is a failure, unless the policy causes it (`policy_errors`). The class of the
exception is that of Python's traceback at the end of the standard error, or in any language what
the last line of the standard output names, `{"error": "PolicyError"}`. In a sandbox the policy may
have caused any failure after its first answer, because an agent may run there what it writes: the
attempt ends as `StopReason.agent_crash` and is scored.

The end of what it writes goes to `logs/agents.log`, also if it succeeds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.sections.agent import AGENT_OUTPUT_LOGGER
from mega_agentrl.rollout.agents.base import AgentCommandError, AgentResultError, PolicyError
from mega_agentrl.sandbox.command import SandboxedCommand, start
from mega_agentrl.sandbox.session import oom_note
from mega_agentrl.sandbox.uid_lease import UID_RANGE, needs_dedicated_uid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.rollout.agents.base import AgentResult, AgentTask
    from mega_agentrl.sandbox.command import SandboxedProcess

GATEWAY_PORT = 8080
"""Port of the gateway on the loopback interface of the sandbox."""

TASK_FIELDS = (
    *("prompt", "tools_kwargs", "data_source", "ground_truth", "extra_info"),
    *("environment_kwargs", "seed", "attempt", "attempt_id"),
)
"""Fields of `AgentTask` that a command reads from its standard input."""

_KEY = "rollout.agent"
_MAX_LINE_BYTES = 1 << 20
_MAX_LOGGED_CHARS = 8192
_COMMANDS_PER_CORE = 16
_MAX_COMMANDS = 400
_SIGNAL_BASE = 128
"""An exit code is this plus the number of the signal that ended a command."""
_SENT_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals that another process sends; the others are those of a crash."""
_NUM_OTHER_UIDS = 64
"""User ids that are left for other sandboxes, if root starts the run."""
_RAISED = re.compile(r"^[ \t]+\S.*\n([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::|$)", re.MULTILINE)
"""The line of a Python traceback that names the exception; it follows an indented line."""
_output_log = logging.getLogger(AGENT_OUTPUT_LOGGER)


def default_num_commands() -> int:
    """Return how many commands may run at once on this machine, if the user sets no number."""
    return min(_COMMANDS_PER_CORE * len(os.sched_getaffinity(0)), _MAX_COMMANDS)


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

    @property
    def is_sandboxed(self) -> bool:
        """Whether the command runs in a sandbox, where what the policy writes may run, too."""
        return self._arguments["isolation"] is not SandboxIsolation.none

    @property
    def max_processes(self) -> int:
        """How many attempts can run at once."""
        if self.is_sandboxed and needs_dedicated_uid():
            return len(UID_RANGE) - _NUM_OTHER_UIDS
        return 1 << 16

    async def run(self, task: AgentTask) -> AgentResult:
        """Run the command to its end; cancellation kills everything that it started.

        Raises:
            AgentCommandError: it ended with another code than 0.
            AgentResultError: its last line is not a reward.
            RuntimeError: it could not be started.
        """
        process = await start(self._command(task), max_line_bytes=_MAX_LINE_BYTES)
        try:
            output, _ = await asyncio.gather(_read_tail(process), _send(process, task))
            code = await process.wait()
        finally:
            await process.kill()
        _log_output(task.attempt_id, code, output, process.stderr_tail())
        last_line = output.rstrip().rpartition(b"\n")[2]
        if code != 0:
            raise self._error(code, last_line, process)
        return _parse_reward(last_line) if self._reads_reward else None

    def _error(self, code: int, last_line: bytes, process: SandboxedProcess) -> AgentCommandError:
        """Return the error of a command that has failed."""
        name = _raised_class(last_line, process.stderr_tail())
        what = f"raised {name}" if name else f"ended with an error: {self.name}"
        if process.num_oom_kills:
            what += f" ({oom_note(process.num_oom_kills)})"
        if self.is_sandboxed and (process.num_oom_kills or code - _SIGNAL_BASE in _SENT_SIGNALS):
            name = PolicyError.__name__
        return AgentCommandError(
            f"the agent {what}: exit code {code}{process.stderr_note()}", class_name=name
        )

    def _command(self, task: AgentTask) -> SandboxedCommand:
        arguments = dict(self._arguments)
        url = task.base_url.removesuffix("/v1")
        if self.is_sandboxed and self._arguments["network"] is NetworkAccess.none:
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
    """Write the task; a command need not read it."""
    body = {name: getattr(task, name) for name in TASK_FIELDS}
    try:
        process.stdin.write(json.dumps(body, default=str).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return
    finally:
        process.stdin.close()


async def _read_tail(process: SandboxedProcess) -> bytes:
    """Read the standard output to its end; its length is not bounded, what is returned is."""
    tail = bytearray()
    while chunk := await process.stdout.read(_MAX_LINE_BYTES):
        tail += chunk
        if len(tail) > 2 * _MAX_LINE_BYTES:  # cut rarely, because it copies
            del tail[:-_MAX_LINE_BYTES]
    return bytes(tail)


def _log_output(attempt_id: str, code: int, output: bytes, stderr: str) -> None:
    """Log the ends of what a command has written, if anything."""
    stdout = output[-4 * _MAX_LOGGED_CHARS :].decode("utf-8", "replace").strip()
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text:
            shown = text[-_MAX_LOGGED_CHARS:]
            _output_log.info("%s, exit code %d, end of %s:\n%s", attempt_id, code, name, shown)


def _raised_class(last_line: bytes, stderr: str) -> str:
    """Return the name of the exception that ended a command; empty if there is none."""
    try:
        named = json.loads(last_line)["error"]
    except (ValueError, TypeError, LookupError, RecursionError):
        named = None
    if isinstance(named, str):
        return named[:200]
    raised = _RAISED.findall(stderr)
    return raised[-1] if raised else ""


def _parse_reward(line: bytes) -> AgentResult:
    try:
        reward: AgentResult = json.loads(line)
    except ValueError as error:
        raise AgentResultError(
            f"the last line of the output: got {line[:200]!r}, expected a JSON number or object"
        ) from error
    return reward
