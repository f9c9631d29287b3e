"""Watches the memory of one machine of a run: nearly full, or a process was killed for it.

The kernel counts the processes that it kills (`oom_kill` in `/proc/vmstat`), not which. If the
count rises, a process of the run that is gone at the next looks was probably one of them. When a
rank dies, the run itself ends the others of its model, often before the next look: the deaths that
the driver has noticed (`remote_calls.DEATHS`) tell which one was first. Ray's memory monitor, which
kills at 95 % of the machine's or container's memory, names the process in the error of its calls
(`remote_calls.RAY_MEMORY_KILLS`). Either way one line has what to lower, and the use of the run's
processes before the kill. Others restart what was killed (`engine_supervisor`,
`train.trainer`).
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

from mega_agentrl.estimate.memory_limits import MemoryLimits
from mega_agentrl.runtime.process_memory import (
    DRIVER,
    RAY,
    SANDBOXES,
    read_processes,
    sum_by_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from mega_agentrl.runtime.process_memory import RunProcess

WARNING_FRACTION = 0.9
"""Share of a limit from which a line warns: Ray's memory monitor kills from 0.95 on."""
REARM_FRACTION = 0.8
"""Share below which the next warning may follow."""
SCAN_INTERVAL_S = 10.0
"""Time between two looks at all processes, each of which takes about 30 us."""
CLOSE_LOOK_FRACTION = 0.75
"""Share from which each look is at all processes, so that the use before a kill is known."""
NUM_LOOKS_AFTER_KILL = 5
"""Looks at which a process may be found gone after the kernel has killed one: a large process takes
seconds to return its memory."""
SANDBOX_LINE_INTERVAL_S = 600.0
"""Time between two lines about kills that concern no rank and no engine: in sandboxes they are
routine."""
MAX_LISTED_PROCESSES = 8
"""Processes of which a line has the memory; a machine may run dozens."""

_LOWER = (
    (DRIVER, "rollout.image_cache_mib, data.prompts_per_step or rollout.agent.max_concurrent"),
    ("policy", "optim.micro_batch_tokens, or use more ranks (parallel)"),
    ("critic", "optim.micro_batch_tokens, or use more ranks (parallel)"),
    ("reward", "optim.micro_batch_tokens, or use more ranks (parallel)"),
    ("engine", "engine.cpu_kv_cache_gib or engine.max_num_seqs"),
    ("sandbox", "tool.python.num_workers or tool.python.memory_limit_mib (tool.workspace.*)"),
    (RAY, "data.prompts_per_step or rollout.group_size"),
)
"""Settings to lower, by the beginning of the name of the process that uses the most."""
_GIB = 2**30


class LimitAlarm:
    """Says when a share comes near its limit, once until it has clearly fallen again."""

    def __init__(
        self, warning_fraction: float = WARNING_FRACTION, rearm_fraction: float = REARM_FRACTION
    ) -> None:
        self._warning_fraction, self._rearm_fraction = warning_fraction, rearm_fraction
        self._is_armed = True

    def check(self, fraction: float) -> bool:
        """Return whether to warn now."""
        if fraction < self._rearm_fraction:
            self._is_armed = True
        if not self._is_armed or fraction < self._warning_fraction:
            return False
        self._is_armed = False
        return True


class MemoryWatch:
    """Looks at the machine that it runs on whenever `check` is called, about once a second.

    Args:
        log_folder: Folder of the log files of the run, by which its processes are known.
        driver_pid: Id of the driver; None if it runs on another machine.
        where: End of the lines, to say which machine; empty for the driver's.
        limits: Limits of the memory.
        deaths: Names of processes as they are found dead.
        read: Reads the processes of the run by id.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        log_folder: Path,
        *,
        driver_pid: int | None = None,
        where: str = "",
        limits: MemoryLimits | None = None,
        deaths: queue.SimpleQueue[str] | None = None,
        read: Callable[[Path, int | None], Mapping[int, RunProcess]] = read_processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_folder, self._driver_pid, self._where = log_folder, driver_pid, where
        self._limits = limits or MemoryLimits()
        self._deaths = deaths or queue.SimpleQueue()
        self._read, self._clock = read, clock
        self._alarm = LimitAlarm()
        self._processes: Mapping[int, RunProcess] = {}
        self._scanned_at_s = -float("inf")
        self._num_kills = self._limits.count_kills()
        self._num_new_kills = 0
        self._num_looks_left = 0
        self._uses_before_kill = ""
        self._num_other_kills = 0
        self._other_line_at_s = -float("inf")
        self._reported_ray_kills: dict[str, float] = {}
        self._noticed_deaths: dict[str, float] = {}
        self.fraction = 0.0
        """Share of the fullest limit at the last look."""
        self.num_kills = 0
        """Processes of this machine that the kernel has killed for memory since the start."""

    def check(self, ray_kills: Iterable[str] = ()) -> list[str]:
        """Look once, and return a line for each thing to report.

        Args:
            ray_kills: Names of processes that Ray's memory monitor has killed.
        """
        self._note_deaths()
        use = self._limits.read()
        self.fraction = use.fraction
        lines = self._describe_ray_kills(ray_kills)  # before a look that no longer finds them
        lines += self._find_kernel_kills()
        is_scanned = self._clock() - self._scanned_at_s < SCAN_INTERVAL_S
        if not is_scanned or use.fraction >= CLOSE_LOOK_FRACTION:
            self._scan()
        if self._alarm.check(use.fraction):
            lines.append(
                f"memory is nearly full: {use}{self._where}. The kernel or Ray's memory monitor "
                f"(from 95 %) will kill processes of the run. {self._describe_uses()}"
            )
        return lines

    def _note_deaths(self) -> None:
        """Keep the deaths of the last seconds, by the names of the processes' log files."""
        now, names = self._clock(), pop_all(self._deaths)
        self._noticed_deaths = {
            name: noticed_at_s
            for name, noticed_at_s in self._noticed_deaths.items()
            if now - noticed_at_s <= SCAN_INTERVAL_S
        } | {_log_name(name): now for name in names}

    def _scan(self) -> None:
        self._processes = self._read(self._log_folder, self._driver_pid)
        self._scanned_at_s = self._clock()

    def _find_kernel_kills(self) -> list[str]:
        """Look whether the kernel has killed a process, and which of the run's are gone."""
        num_kills = self._limits.count_kills()
        num_new = max(0, num_kills - self._num_kills)
        self._num_kills = num_kills
        self.num_kills += num_new
        if num_new:
            if not self._num_looks_left:
                self._uses_before_kill = self._describe_uses()
            self._num_new_kills += num_new
            self._num_looks_left = NUM_LOOKS_AFTER_KILL
        if not self._num_looks_left:
            return []
        self._num_looks_left -= 1
        before = self._processes
        self._scan()
        gone = sum_by_name(
            process
            for pid, process in before.items()
            if pid not in self._processes and process.name not in (SANDBOXES, RAY)
        )
        if gone:
            killed = self._describe_killed(gone)
            self._num_new_kills = self._num_looks_left = 0
            return [
                f"killed by the kernel for lack of memory{self._where}, by its count of such kills:"
                f" {killed}. {self._uses_before_kill}"
            ]
        return [] if self._num_looks_left else self._describe_other_kills()

    def _describe_killed(self, gone: Mapping[str, int]) -> str:
        """Return which of the processes that are gone the kernel has probably killed."""
        if len(gone) > self._num_new_kills:
            self._note_deaths()  # those that came before the run ended other processes
            noticed = {name: size for name, size in gone.items() if name in self._noticed_deaths}
            gone = noticed or gone
        is_exact = len(gone) <= self._num_new_kills
        return f"{'' if is_exact else f'{self._num_new_kills} of '}{_list_sizes(gone)}"

    def _describe_other_kills(self) -> list[str]:
        """Return a line about kills that concern no rank and no engine, from time to time."""
        self._num_other_kills += self._num_new_kills
        self._num_new_kills = 0
        if self._clock() - self._other_line_at_s < SANDBOX_LINE_INTERVAL_S:
            return []
        self._other_line_at_s = self._clock()
        number, self._num_other_kills = self._num_other_kills, 0
        return [
            f"the kernel killed for lack of memory{self._where or ' here'}: {number} of the "
            "machine's processes, none of them a rank or an engine of this run; probable cause: "
            "code that a tool ran beyond the limit of its sandbox (tool.python.memory_limit_mib, "
            "tool.workspace.memory_limit_mib), which only that call notices, or another job"
        ]

    def _describe_ray_kills(self, names: Iterable[str]) -> list[str]:
        """Return a line about processes that Ray killed; all of their calls name them."""
        now = self._clock()
        new = [
            name
            for name in dict.fromkeys(names)
            if now - self._reported_ray_kills.get(name, -float("inf")) > SCAN_INTERVAL_S
        ]
        self._reported_ray_kills.update(dict.fromkeys(new, now))
        if not new:
            return []
        uses = self._describe_uses()
        return [f"killed by Ray's memory monitor for lack of memory: {', '.join(new)}. {uses}"]

    def _describe_uses(self) -> str:
        """Return the memory of the run's processes at the last scan, and what to lower."""
        if not self._processes:
            self._scan()
        uses = sum_by_name(self._processes.values())
        age_s = self._clock() - self._scanned_at_s
        lower = what_to_lower(uses)
        return (
            f"{f'Lower {lower}. ' if lower else ''}"
            f"The run's processes {age_s:.0f} s before: {_list_sizes(uses) or 'none'}"
        )


def what_to_lower(bytes_by_name: Mapping[str, int]) -> str:
    """Return what to lower for the kind of process that uses the most; empty without processes."""
    sums = [
        (sum(size for name, size in bytes_by_name.items() if name.startswith(prefix)), settings)
        for prefix, settings in _LOWER
    ]
    size, settings = max(sums)
    return settings if size else ""


def _log_name(process_name: str) -> str:
    """Return the name of a process's log file, `reward-rank0` of `reward model rank 0`."""
    words = process_name.split(" (")[0].replace(" model ", " ").split(" ")
    return f"{'-'.join(words[:-1])}{words[-1]}"


def _list_sizes(bytes_by_name: Mapping[str, int]) -> str:
    """Return names with their GiB, in the given order, those beyond the first ones together."""
    sizes = list(bytes_by_name.items())
    listed, others = sizes[:MAX_LISTED_PROCESSES], sizes[MAX_LISTED_PROCESSES:]
    if others:
        listed.append((f"{len(others)} others", sum(size for _, size in others)))
    return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in listed)


def pop_all(names: queue.SimpleQueue[str]) -> list[str]:
    """Remove and return what a queue holds, in order."""
    popped = []
    while True:
        try:
            popped.append(names.get_nowait())
        except queue.Empty:
            return popped
