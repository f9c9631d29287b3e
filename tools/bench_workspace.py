"""Benchmarks workspaces against a new bubblewrap per call and copied folders, one line per case.

    python tools/bench_workspace.py [--quick] [--cases PATTERN ...] [--rounds N]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. A pattern is a
shell pattern over the whole name of a case, which ends with p50 or p99:

    start/...      opening a workspace, with the first call
    call/...       `echo` in an open workspace
    fork/SIZE/...  forking a workspace that has written SIZE in 10 files
    many/...       the same with 10 MB in 1000 files

The baseline of a call is a new `bwrap` with bash for the same command; that of a start or a fork is
to copy the project folder, or a folder of that size, and to start such a `bwrap`.
A fork is timed until the child can take its first call. The folders of the baseline are on the file
system of the temporary folder. All rounds alternate between both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.sandbox.session import SandboxSession
    from mega_agentrl.sandbox.workspace.pool import WorkspacePool

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.bench_sandbox import DEADLINE_S, checked_output, percentile  # noqa: E402
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402

FORKS = {"fork/1MB": (1, 10), "fork/10MB": (10, 10), "fork/100MB": (100, 10), "many": (10, 1000)}
"""Megabytes and number of files of each case."""
NAMES = ("start", "call", *FORKS)
SHARES = {"p50": 0.5, "p99": 0.99}
PROJECT_FILES = 200
PROJECT_FILE_BYTES = 20_000


def case_names() -> list[str]:
    """Return the names of all cases in the order in which they run."""
    return [f"{name}/{rank}" for name in NAMES for rank in SHARES]


def write_files(folder: Path, megabytes: int, num_files: int) -> None:
    """Fill a folder with files of equal size."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (folder / str(number)).write_bytes(b"x" * (megabytes * 1_000_000 // num_files))


def write_command(megabytes: int, num_files: int) -> str:
    """Return the command that does the same in a workspace."""
    size = megabytes * 1_000_000 // num_files
    return (
        f"mkdir -p w; head -c {size} /dev/zero | tr '\\0' x > w/0; "
        f"for ((i = 1; i < {num_files}; i++)); do cp w/0 w/$i; done"
    )


def run_cold(command: str) -> None:
    """Run a command in a new bubblewrap with a new bash."""
    from mega_agentrl.sandbox.isolation import find_bubblewrap

    words = f"{find_bubblewrap()} --unshare-all --die-with-parent --ro-bind /usr /usr "
    words += "--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 "
    words += f"--proc /proc --dev /dev --tmpfs /tmp bash -c {shlex.quote(command)}"
    subprocess.run(shlex.split(words), check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the duration of the block."""
    begin = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin)


class WorkspaceBench:
    """Measures cases on a started pool.

    Args:
        pool: The workspaces.
        folder: Where the baseline copies folders.
        rounds: Measurements of each case.
    """

    def __init__(self, pool: WorkspacePool, folder: Path, rounds: int) -> None:
        self._pool = pool
        self._folder = folder
        self._rounds = rounds

    async def measure(self, name: str) -> tuple[list[float], list[float]]:
        """Return the seconds of both sides."""
        if name == "start":
            return await self._start()
        if name == "call":
            return await self._call()
        return await self._fork(*FORKS[name])

    async def _start(self) -> tuple[list[float], list[float]]:
        ours: list[float] = []
        baseline: list[float] = []
        for _ in range(self._rounds):
            with timed(ours):
                session = await self._pool.open()
                await checked_output(session.run("echo ready"))
            await session.close()
            self._copy(self._folder / "project", baseline)
        return ours, baseline

    async def _call(self) -> tuple[list[float], list[float]]:
        ours: list[float] = []
        baseline: list[float] = []
        session = await self._pool.open()
        for number in range(self._rounds):
            with timed(ours):
                await checked_output(session.run(f"echo {number}"))
            with timed(baseline):
                run_cold(f"echo {number}")
        await session.close()
        return ours, baseline

    async def _fork(self, megabytes: int, num_files: int) -> tuple[list[float], list[float]]:
        ours: list[float] = []
        baseline: list[float] = []
        source = self._folder / f"source-{megabytes}-{num_files}"
        write_files(source, megabytes, num_files)
        session: SandboxSession = await self._pool.open()
        await checked_output(session.run(write_command(megabytes, num_files)))
        for _ in range(self._rounds):
            with timed(ours):
                child = await session.fork()
            await checked_output(child.run(f"cmp w/0 w/{num_files - 1}"))
            await child.close()
            self._copy(source, baseline)
        await session.close()
        return ours, baseline

    def _copy(self, source: Path, seconds: list[float]) -> None:
        target = self._folder / "copy"
        with timed(seconds):
            shutil.copytree(source, target)
            run_cold("echo ready")
        shutil.rmtree(target)


async def measure_all(chosen: Sequence[str], rounds: int) -> None:
    """Print the line of each case."""
    from mega_agentrl.config.sections.tools import WorkspaceToolConfig
    from mega_agentrl.sandbox.workspace.pool import WorkspacePool

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megabytes = PROJECT_FILES * PROJECT_FILE_BYTES // 1_000_000
        write_files(folder / "project", megabytes, PROJECT_FILES)
        pool = WorkspacePool(
            WorkspaceToolConfig(root="host", folder=str(folder / "project"), timeout_s=DEADLINE_S)
        )
        await pool.start()
        try:
            bench = WorkspaceBench(pool, folder, rounds)
            seconds: dict[str, tuple[list[float], list[float]]] = {}
            for case in chosen:
                case_name, _, rank = case.rpartition("/")
                if case_name not in seconds:
                    seconds[case_name] = await bench.measure(case_name)
                ours, baseline = (percentile(part, SHARES[rank]) for part in seconds[case_name])
                line = bench_line("workspace", case, "s", ours, baseline)
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
        finally:
            await pool.close()


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each case")
    options = parse_options(parser, arguments, rounds=3)
    try:
        chosen = select_cases(options.cases, case_names())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asyncio.run(measure_all(chosen, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
