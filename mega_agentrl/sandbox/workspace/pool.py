"""A pool of sandboxes that hold workspaces; each workspace is a session that can be forked.

The pool, its sandboxes, sessions, control groups and user ids are those of the stateful Python
interpreter (`sandbox.pool`). Only what a session holds is different: a workspace
(`guest.workspace`). Its output is what the command has written to stdout and stderr, in that order.
A command that fails is an error of the policy. At a timeout all processes of the workspace end,
those in the background too, and the shell continues from its state before the call; files stay as
they are then. A workspace whose first process has died is lost for good (`session`).

Not covered, beyond what `isolation` says: the policy can change every file of its own workspace, so
that a reward command must not trust files that the policy can write (tests, configuration of the
test program, installed packages), but restore them from `FOLDER_LAYER`; and files that a background
process is writing at a fork may be copied half-written. Hard links become separate files in a fork.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.cgroup import create_cgroup
from mega_agentrl.sandbox.client import (
    MAX_OUTPUT_CHARS,
    Sandbox,
    read_limit_outcome,
)
from mega_agentrl.sandbox.guest.settings import GuestSettings, WorkspaceSettings
from mega_agentrl.sandbox.guest.workspace.layers import (
    FOLDER_LAYER,
    MOUNT_POINTS,
    ROOT_LAYER,
    WORKSPACE,
)
from mega_agentrl.sandbox.isolation import interpreter_path, shell_variables
from mega_agentrl.sandbox.pool import SandboxPool, check_machine
from mega_agentrl.sandbox.session import SandboxSession
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.sandbox.workspace.root import resolve_root
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.config.sections.tools import WorkspaceToolConfig
    from mega_agentrl.sandbox.client import SandboxLostError, SandboxResult

_NUM_OPEN_FILES = 1024
_NUM_INODES = 200_000
_OUTPUT_END_CHARS = MAX_OUTPUT_CHARS
"""Characters kept of the beginning, and of the end, of an output."""


class WorkspaceSession(SandboxSession):
    """A workspace; `run` runs a command in its shell."""

    async def set_up(self, command: str, timeout_s: float) -> SandboxResult:
        """Run a command of the task's author, before the policy's first call."""
        return await self._run(command, timeout_s, "default", is_policy=False)

    async def run_clean(self, command: str, timeout_s: float) -> SandboxResult:
        """End all processes, and run a command in a new shell without the state of the old one.

        Its home folder is a new, empty one.
        """
        return await self._run(command, timeout_s, "clean", is_policy=False)

    async def edit(self, request: str, timeout_s: float | None = None) -> SandboxResult:
        """Edit or view a file; `request` is the JSON of `guest.workspace.edit`."""
        return await self._run(request, timeout_s, "edit")

    def _is_final_loss(self, result: SandboxResult) -> bool:
        return result.state_lost or not result.is_alive


class WorkspacePool(SandboxPool):
    """A pool of sandboxes for workspaces; call `start` before the first `open`.

    Args:
        config: Section `tool.workspace`, enabled.
    """

    _session_type = WorkspaceSession

    def __init__(self, config: WorkspaceToolConfig) -> None:
        super().__init__(
            PythonToolConfig(
                mode=PythonMode.stateful,
                num_workers=config.num_workers,
                timeout_s=config.timeout_s,
                memory_limit_mib=config.memory_limit_mib,
                preload_modules=[],
            )
        )
        self._workspace_config = config
        self._layers: dict[str, str] = {}

    async def open(self) -> WorkspaceSession:
        """Return a new workspace."""
        session = await super().open()
        assert isinstance(session, WorkspaceSession)
        return session

    def _check_and_configure(self) -> None:
        config = self._workspace_config
        self._layers = _layers(config)
        check_machine()
        sample = create_cgroup(memory_mib=config.memory_limit_mib, num_processes=1)
        limits_memory = sample.limits_memory
        sample.close()
        self._settings = GuestSettings(
            seccomp_filter=seccomp_filter_base64(stateful=False, protects_process_1=True),
            stateful=True,
            memory_mib=0 if limits_memory else config.memory_limit_mib,
            cpu_limit_s=max(1.0, config.timeout_s, config.reward_timeout_s),
            num_processes=config.num_processes,
            num_open_files=_NUM_OPEN_FILES,
            max_file_mib=config.disk_limit_mib,
            max_output_bytes=8 * _OUTPUT_END_CHARS,  # the longest UTF-8 sequence is 4 bytes
            workspace=WorkspaceSettings(
                has_root=ROOT_LAYER in self._layers,
                has_folder=FOLDER_LAYER in self._layers,
                disk_mib=config.disk_limit_mib,
                num_inodes=_NUM_INODES,
                variables=_variables(has_root=ROOT_LAYER in self._layers),
            ),
        )

    def _make_sandbox(self) -> Sandbox:
        return Sandbox(
            self._settings,
            total_memory_mib=self._workspace_config.memory_limit_mib,
            layers=self._layers,
            read_outcome=read_workspace_outcome,
        )

    def _start_error(self, failure: SandboxLostError) -> ValueError:
        return ConfigError(
            "tool.workspace.root",
            self._workspace_config.root,
            f"a root file system in which a shell starts, but: {failure}",
            "Linux before 6.6, which has no overlay file systems with user attributes on a tmpfs, "
            "a kernel or container that refuses overlay file systems in user namespaces, or a "
            "root file system without /bin/bash",
        )


def read_workspace_outcome(reply: dict[str, Any], timeout_s: float) -> tuple[ToolStatus, str]:
    """Return the status and output of a workspace's call from the event of its end."""
    if not reply["alive"] or reply["state_lost"]:
        return ToolStatus.infra_error, "its first process has ended"
    output = _cut_middle(reply["stdout"].strip("\n"), reply["num_dropped_bytes"])
    if reply["end"] != "exit":
        status, text = read_limit_outcome(reply["end"], timeout_s)
        note = (
            f"{text} All processes of the workspace were ended; the shell continues as it was "
            "before this command."
        )
        return status, f"{output}\n[{note}]".lstrip()
    if reply["code"] == 0:
        return ToolStatus.ok, output
    return ToolStatus.user_error, f"{output}\n[exit code {reply['code']}]".lstrip()


def _cut_middle(text: str, num_dropped: int) -> str:
    num_cut = len(text) - 2 * _OUTPUT_END_CHARS
    if num_cut <= 0:
        return text
    first, last = text[:_OUTPUT_END_CHARS], text[-_OUTPUT_END_CHARS:]
    return f"{first}\n[{num_cut + num_dropped} characters cut]\n{last}"


def _layers(config: WorkspaceToolConfig) -> dict[str, str]:
    """Return the folders to mount by mount points; raises `ConfigError`."""
    layers = dict.fromkeys((*MOUNT_POINTS, WORKSPACE), "")
    root = resolve_root(config.root)
    if root is not None:
        layers[ROOT_LAYER] = str(root)
    if config.folder:
        folder = Path(config.folder).absolute()
        if not folder.is_dir():
            raise ConfigError("tool.workspace.folder", config.folder, "an existing folder")
        layers[FOLDER_LAYER] = str(folder)
    return layers


def _variables(*, has_root: bool) -> dict[str, str]:
    """Return the environment of a new shell; with `root: host` it finds this run's Python."""
    folders = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    if not has_root:
        folders = [str(Path(interpreter_path()).parent), *folders]
    return shell_variables() | {"PATH": ":".join(dict.fromkeys(folders))}
