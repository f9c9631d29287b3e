"""Records the starts of a run folder in `starts.jsonl`: command, presets, commits, versions.

`runtime.start_record` collects the facts. The trackers get those of the latest start, and the
report page shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from pathlib import Path

STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A start of a run."""

    time: str
    """UTC time in ISO format."""
    host: str
    pid: int
    command: str
    """The command line, quoted for a shell."""
    working_folder: str
    overrides: tuple[str, ...] = ()
    """Overrides of the run; in a sweep those of its job."""
    presets: Mapping[str, str] = field(default_factory=dict)
    """Chosen option by config group, such as `algo: arpo`."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """Commit by folder, of the package and of the working folder as far as they are in a git
    repository; `-dirty` at the end means that files were changed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Version by package, and that of Python."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Operating system, cores, GPUs and Slurm job, as far as there are any."""

    def facts(self) -> dict[str, str]:
        """Return everything as text by dotted name, such as `versions.torch`."""
        facts: dict[str, str] = {}
        for name, value in to_builtins(self).items():
            if isinstance(value, dict):
                facts |= {f"{name}.{key}": str(item) for key, item in value.items()}
            else:
                facts[name] = " ".join(value) if isinstance(value, list | tuple) else str(value)
        return facts


def append_start(run_dir: Path, start: RunStart) -> None:
    """Add a start to the file of the run folder."""
    with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(to_builtins(start)) + "\n")


def read_starts(run_dir: Path) -> list[RunStart]:
    """Return the starts in order; lines of a killed or a newer version are left out."""
    path = run_dir / STARTS_FILE
    starts = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in lines:
        try:
            starts.append(from_builtins(RunStart, json.loads(line), str(path)))
        except (ValueError, RecursionError):
            continue
    return starts
