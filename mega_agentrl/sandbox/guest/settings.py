"""Settings that the host passes to the guest program as its one argument."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class WorkspaceSettings:
    """The file systems and the shell of a workspace."""

    has_root: bool
    """Whether `ROOT_LAYER` is a root file system; else the system is that of the sandbox."""
    has_folder: bool
    """Whether `FOLDER_LAYER` is the project folder; else it starts empty."""
    disk_mib: int
    """Size of everything that the workspace writes, /tmp and /dev/shm included."""
    num_inodes: int
    """Number of the files that it writes."""
    variables: dict[str, str]
    """Environment variables of a new shell."""


@dataclass(kw_only=True)
class GuestSettings:
    """Mode of the sandbox and limits of each call or session."""

    preload_modules: tuple[str, ...] = ()
    """Modules imported before the first call."""
    seccomp_filter: str = ""
    """The seccomp program, base64 of its BPF bytes."""
    stateful: bool = False
    """Whether interpreters are kept for sessions and may be forked."""
    isolated: bool = True
    """False for trusted code without isolation."""
    workspace: WorkspaceSettings | None = None
    """Set if the sandbox runs workspaces with a shell instead of Python interpreters."""
    memory_mib: int = 512
    """Address space beyond that of the warm interpreter, per process; 0 for no limit."""
    cpu_limit_s: float = 20.0
    """CPU time of a call's main process, and of each other process."""
    num_processes: int = 64
    """Processes and threads of an interpreter together."""
    num_open_files: int = 256
    """Open files, per process."""
    max_file_mib: int = 64
    """Size of one file."""
    tmpfs_mib: int = 64
    """Size of /tmp, and of /dev/shm."""
    num_inodes: int = 4096
    """Files in /tmp, and in /dev/shm."""
    max_output_bytes: int = 16384
    """Bytes kept of stdout, and of stderr."""

    def to_json(self) -> str:
        """Return the program's argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> GuestSettings:
        """Parse the program's argument."""
        values = json.loads(text)
        modules = tuple(values.get("preload_modules", ()))
        workspace = WorkspaceSettings(**values["workspace"]) if values.get("workspace") else None
        return GuestSettings(**values | {"preload_modules": modules, "workspace": workspace})
