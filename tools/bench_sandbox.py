"""Benchmarks the Python sandbox against a new subprocess per call, one JSON line per case.

    python tools/bench_sandbox.py [--quick] [--cases PATTERN ...] [--calls N] [--workers N]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. The baseline is
that of the released ARPO code: `python -c CODE` in a subprocess of the launcher's interpreter,
without isolation. It runs once, although the released code repeats a call that prints nothing up to
three times. A pattern is a shell pattern over the whole name of a case:

    rate/KIND           seconds per call with `workers` calls at a time
    p50/KIND, p99/KIND  latency of a call, one at a time
    stateful/p50, p99   a call in a live session, against a cold call
    fork/p50, p99       forking a session of several calls until the child has answered its first
                        call, against a cold start that repeats those calls
    refork/p50, p99     the same until the parent has answered its next call too
    memory/idle         proportional MiB per idle sandbox, against an idle interpreter with the same
                        imports; memory/session: per idle session

KIND is plain, numpy, sympy, pandas, or mix: a third plain, a third numpy, the rest alternately
sympy and pandas. Both sides run the same snippets in the same order and must print the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from mega_agentrl.config.enums import PythonMode
    from mega_agentrl.sandbox.pool import SandboxPool

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402

PRELOAD = ("numpy", "sympy", "pandas")
KINDS = ("plain", *PRELOAD, "mix")
SNIPPETS = {
    "plain": "total = 0\nfor i in range(1000):\n    total += i * i % {n}\nprint(total)",
    "numpy": (
        "import numpy as np\na = np.arange(400.0).reshape(20, 20) + {n} * np.eye(20)\n"
        "print(round(float(np.linalg.inv(a).sum()), 6))"
    ),
    "sympy": (
        "from sympy import expand, solve, symbols\nx = symbols('x')\n"
        "print(solve(expand((x - {n}) * (x + 2)), x))"
    ),
    "pandas": (
        "import pandas as pd\ntable = pd.DataFrame({{'a': [1, 2, 1], 'b': [{n}, 2, 3]}})\n"
        "print(table.groupby('a')['b'].sum().to_dict())"
    ),
}
HISTORY = (
    "import numpy as np\nrows = [i * i for i in range(1000)]",
    "table = np.array(rows).reshape(100, 10)\nopen('table.txt', 'w').write(str(table.sum()))",
    "def total(row):\n    return int(table[row].sum())",
)
BRANCH = "print(total(7), open('table.txt').read())"
SESSION_CASES = ("stateful/", "fork/", "refork/", "memory/session")
ROUNDS = 5
COLD_CALLS = 12
"""Baseline calls of a rate; a multiple of the period of a mix."""
DEADLINE_S = 60.0
QUICK_CASES = ["rate/mix", "p50/plain", "p99/numpy", "stateful/p50", "fork/p99", "memory/session"]


def case_names() -> list[str]:
    """Return the names of all cases in the order in which they run."""
    names = [f"{what}/{kind}" for what in ("rate", "p50", "p99") for kind in KINDS]
    pairs = [f"{what}/{rank}" for what in ("stateful", "fork", "refork") for rank in ("p50", "p99")]
    return [*names, *pairs, "memory/idle", "memory/session"]


def snippets(kind: str, count: int) -> list[str]:
    """Return `count` different programs of a kind."""
    kinds = ["plain", "numpy", "sympy", "plain", "numpy", "pandas"] if kind == "mix" else [kind]
    return [SNIPPETS[kinds[n % len(kinds)]].format(n=n + 3) for n in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that is not below a fraction `share` of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def line(case: str, ours: float, baseline: float, unit: str = "s") -> dict[str, object]:
    """Return the JSON line of a case."""
    return bench_line("sandbox", case, unit, ours, baseline)


# ---- the baseline --------------------------------------------------------------------------


def run_cold_subprocess(code: str) -> str:
    """Run `python -c CODE`; raise `RuntimeError` with its stderr if it fails."""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd="/tmp",
    )
    if completed.returncode:
        raise RuntimeError(f"the baseline failed: {completed.stderr}")
    return completed.stdout.strip()


def measure_cold_memory_mib() -> float:
    """Return the proportional MiB of an idle interpreter while a second one is running."""
    code = f"import {', '.join(PRELOAD)}\nprint('ready', flush=True)\ninput()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            child.stdout.readline()  # type: ignore[union-attr]
        return proportional_memory_mib([psutil.Process(children[0].pid)])
    finally:
        for child in children:
            child.communicate(b"\n")


# ---- ours ----------------------------------------------------------------------------------


class SandboxBench:
    """Runs the cases on a started pool."""

    def __init__(self, pool: SandboxPool, num_calls: int, workers: int) -> None:
        self._pool = pool
        self._num_calls = num_calls
        self._workers = workers
        self._latencies_by_kind: dict[str, tuple[list[float], list[float]]] = {}

    async def measure(self, case: str) -> dict[str, Any]:
        """Measure a case and return its line."""
        what, detail = case.split("/")
        if what == "rate":
            return await self._rate(case, detail)
        if what == "memory":
            return await self._memory(case, detail)
        share = {"p50": 0.5, "p99": 0.99}[detail if what not in ("p50", "p99") else what]
        kind = what if what not in ("p50", "p99") else detail
        if kind not in self._latencies_by_kind:
            self._latencies_by_kind[kind] = await self._latencies(kind)
        ours, baseline = self._latencies_by_kind[kind]
        return line(case, percentile(ours, share), percentile(baseline, share))

    async def _rate(self, case: str, kind: str) -> dict[str, Any]:
        codes = snippets(kind, self._num_calls)
        cold_codes = codes[:COLD_CALLS]
        ours_s, baseline_s = [], []
        for _ in range(ROUNDS):  # alternating, so that other load affects both sides
            begin = time.perf_counter()
            answers = await run_concurrently(codes, self._run, self._workers)
            ours_s.append((time.perf_counter() - begin) / len(codes))
            begin = time.perf_counter()
            with ThreadPoolExecutor(self._workers) as threads:
                expected = list(threads.map(run_cold_subprocess, cold_codes))
            baseline_s.append((time.perf_counter() - begin) / len(cold_codes))
            check_equal(answers, expected)
        return line(case, statistics.median(ours_s), statistics.median(baseline_s))

    async def _latencies(self, kind: str) -> tuple[list[float], list[float]]:
        if kind == "stateful":
            return await self._stateful()
        if kind in ("fork", "refork"):
            return await self._fork_latencies(call_parent=kind == "refork")
        return await measure_interleaved(snippets(kind, self._num_calls), self._run)

    async def _stateful(self) -> tuple[list[float], list[float]]:
        session = await self._pool.open()
        codes = [f"x = {n}\nprint(x * 7)" for n in range(self._num_calls)]
        latencies = await measure_interleaved(codes, lambda code: checked_output(session.run(code)))
        await session.close()
        return latencies

    async def _fork_latencies(self, *, call_parent: bool) -> tuple[list[float], list[float]]:
        ours, baseline = [], []
        replay = "\n".join([*HISTORY, BRANCH])
        for number in range(max(12, self._num_calls // 5)):
            if number % 4 == 0:
                begin = time.perf_counter()
                expected = run_cold_subprocess(replay)
                baseline.append(time.perf_counter() - begin)
            session = await self._pool.open()
            for code in HISTORY:
                await checked_output(session.run(code))
            begin = time.perf_counter()
            child = await session.fork()
            check_equal([await checked_output(child.run(BRANCH))], [expected])
            if call_parent:
                check_equal([await checked_output(session.run(BRANCH))], [expected])
            ours.append(time.perf_counter() - begin)
            await child.close()
            await session.close()
        return ours, baseline

    async def _memory(self, case: str, detail: str) -> dict[str, Any]:
        processes = psutil.Process().children(recursive=True)
        if detail == "idle":
            ours = proportional_memory_mib(processes) / self._workers
            return line(case, ours, measure_cold_memory_mib(), "MiB")
        before = proportional_memory_mib(processes)
        sessions = [await self._pool.open() for _ in range(8)]
        for session in sessions:
            await checked_output(session.run("x = 1\nprint(x)"))
        after = proportional_memory_mib(psutil.Process().children(recursive=True))
        for session in sessions:
            await session.close()
        return line(
            case, max(after - before, 0.01) / len(sessions), measure_cold_memory_mib(), "MiB"
        )

    async def _run(self, code: str) -> str:
        return await checked_output(self._pool.run(code))


async def checked_output(running: Awaitable[Any]) -> str:
    """Return the output of a call; raise `RuntimeError` if it failed."""
    result = await running
    if result.status.value != "ok":
        raise RuntimeError(f"our call ended with {result.status.value}: {result.output}")
    return str(result.output)


async def measure_interleaved(
    codes: Sequence[str], run: Callable[[str], Awaitable[str]]
) -> tuple[list[float], list[float]]:
    """Return the seconds of each call by `run`, and of every tenth by a cold subprocess."""
    ours, baseline = [], []
    for number, code in enumerate(codes):
        begin = time.perf_counter()
        answer = await run(code)
        ours.append(time.perf_counter() - begin)
        if number % 10 == number // 10 % 10:  # so that all kinds of a mix are included
            begin = time.perf_counter()
            expected = run_cold_subprocess(code)
            baseline.append(time.perf_counter() - begin)
            check_equal([answer], [expected])
    return ours, baseline


async def run_concurrently(
    codes: Sequence[str], run: Callable[[str], Awaitable[str]], limit: int
) -> list[str]:
    """Run all programs, at most `limit` at a time, and return their outputs."""
    slots = asyncio.Semaphore(limit)

    async def run_in_slot(code: str) -> str:
        async with slots:
            return await run(code)

    return list(await asyncio.gather(*map(run_in_slot, codes)))


def check_equal(answers: Sequence[str], expected: Sequence[str]) -> None:
    """Raise `RuntimeError` if outputs differ; surplus outputs of the longer side are ignored."""
    for number, (ours, theirs) in enumerate(zip(answers, expected, strict=False)):
        if ours != theirs:
            raise RuntimeError(f"call {number}: ours printed {ours!r}, the baseline {theirs!r}")


def proportional_memory_mib(processes: Iterable[psutil.Process]) -> float:
    """Return the proportional set size in MiB: shared pages are divided by their users."""
    total_bytes = 0
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            total_bytes += process.memory_full_info().pss
    return total_bytes / 2**20


async def measure_all(chosen: Sequence[str], num_calls: int, workers: int) -> None:
    """Print the line of each case, stateless calls first."""
    from mega_agentrl.config.enums import PythonMode

    with_sessions = [case for case in chosen if case.startswith(SESSION_CASES)]
    without = [case for case in chosen if case not in with_sessions]
    for mode, cases in ((PythonMode.stateless, without), (PythonMode.stateful, with_sessions)):
        if cases:
            await measure_mode(mode, cases, num_calls, workers)


async def measure_mode(
    mode: PythonMode, chosen: Sequence[str], num_calls: int, workers: int
) -> None:
    """Print the line of each case on a pool in the given mode."""
    from mega_agentrl.config.sections.tools import PythonToolConfig
    from mega_agentrl.sandbox.pool import SandboxPool

    config = PythonToolConfig(
        mode=mode, num_workers=workers, preload_modules=list(PRELOAD), timeout_s=DEADLINE_S
    )
    pool = SandboxPool(config)
    await pool.start()
    try:
        bench = SandboxBench(pool, num_calls, workers)
        for kind in SNIPPETS:  # warm up both sides
            (code,) = snippets(kind, 1)
            check_equal([await checked_output(pool.run(code))], [run_cold_subprocess(code)])
        for case in chosen:
            sys.stdout.write(json.dumps(await bench.measure(case)) + "\n")
            sys.stdout.flush()
    finally:
        await pool.close()


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    args = parse_options(parser, arguments, calls=12, cases=QUICK_CASES)
    try:
        chosen = select_cases(args.cases, case_names())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asyncio.run(measure_all(chosen, args.calls, args.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
