"""What the launcher tells the program inside the wall, as its one argument."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class Settings:
    """Limits of each call or session.

    preload: modules imported before the first call. filter: the seccomp program, base64 of
    its BPF bytes. stateful: cells are kept for sessions and may be forked. walled: False for
    trusted code without isolation. memory_mib: address space beyond what the warm
    interpreter has, per process. cpu_s: CPU time of a call's main process, and of each
    other. num_processes: together. file_mib: one file. tmpfs_mib, num_inodes: each of /tmp
    and /dev/shm. output_bytes: kept of stdout and of stderr.
    """

    preload: tuple[str, ...] = ()
    filter: str = ""
    stateful: bool = False
    walled: bool = True
    memory_mib: int = 512
    cpu_s: float = 20.0
    num_processes: int = 64
    num_files: int = 256
    file_mib: int = 64
    tmpfs_mib: int = 64
    num_inodes: int = 4096
    output_bytes: int = 16384

    def to_json(self) -> str:
        """The program's argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        """The same, read back."""
        values = json.loads(text)
        return Settings(**values | {"preload": tuple(values.get("preload", ()))})
