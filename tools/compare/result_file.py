"""Results of finished runs in one text file, from which a comparison continues on another machine.

A comparison takes hours, and the file is small enough to be committed beside its page. Each line is
a JSON object with a run's task, name, commit, date and evaluations, and a digest of its settings. A
run counts as finished only if the digest is that of the planned run; lines of other settings stay
in the file and are ignored. Settings at their default are left out of the digest, so that it stays
the same when a later version has more of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.report.config_diff import flatten_config, schema_defaults
from mega_agentrl.types.serialization import from_builtins, to_builtins
from tools.compare.run import FinishedRun

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from tools.compare.plan import PlannedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """A line of the file."""

    task: str
    run: str
    is_tuning: bool
    settings: str
    """Digest of the run's settings."""
    commit: str
    """Commit of the code that made the run."""
    date: str
    result: FinishedRun


class ResultFile:
    """The finished runs of a file, to which further ones are appended."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one.

        Raises:
            ValueError: A line is not a result.
        """
        self._path = path
        self._lines: list[ResultLine] = []
        if not path.is_file():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            where = f"{path}, line {number}"
            try:
                self._lines.append(from_builtins(ResultLine, json.loads(line), where))
            except json.JSONDecodeError as error:
                cause = f"{error}: a merge conflict, or an edit by hand"
                raise InputError(where, line[:80], "a JSON object", cause) from error

    def find(self, task: str, run: PlannedRun) -> FinishedRun | None:
        """Return the newest result of a run of a task, or None if it is not finished."""
        key = (task, run.name, run.is_tuning, digest_settings(run.settings))
        for line in reversed(self._lines):
            if (line.task, line.run, line.is_tuning, line.settings) == key:
                return line.result
        return None

    def append(self, task: str, run: PlannedRun, result: FinishedRun, commit: str) -> None:
        """Add a result."""
        line = ResultLine(
            task=task,
            run=run.name,
            is_tuning=run.is_tuning,
            settings=digest_settings(run.settings),
            commit=commit,
            date=f"{datetime.now(tz=UTC):%Y-%m-%d}",
            result=result,
        )
        self._lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_builtins(line)) + "\n")

    @property
    def commits(self) -> list[str]:
        """The commits of the results, in order."""
        return list(dict.fromkeys(line.commit for line in self._lines))


def digest_settings(settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings that differ from the schema's defaults."""
    defaults = schema_defaults()
    changed = {
        key: value
        for key, value in flatten_config(settings).items()
        if key not in defaults or defaults[key] != value
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]
