"""Measures what attacks on the Python sandbox cost a neighbour, one JSON line per case.

    python tools/bench_neighbours.py [--quick] [--cases PATTERN ...] [--calls N]

The attacks are those of tests/escape. A line has the keys bench, case, unit, ours, baseline and
ratio = baseline / ours: `ours` is the neighbour's latency under the attack, `baseline` the same
neighbour's alone, just before. A stateful neighbour is a session in the attacker's sandbox, which
has forked once more for every fifth call; a stateless one shares the pool. A wrong answer of the
neighbour ends the benchmark. A pattern is a shell pattern over the whole name of a case,
MODE/ATTACK/FIGURE:

    call-p50, call-max    latency of a call
    fork-max              forking the session until the child has answered its first call

`busy loops` is not an attack; it shows what any load on all cores costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from mega_agentrl.sandbox.pool import SandboxPool
    from mega_agentrl.sandbox.session import SandboxSession

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.escape import test_bombs, test_neighbours, test_user_counts  # noqa: E402
from tests.escape.outside import with_values  # noqa: E402
from tests.escape.test_process_limit import IN_THE_WINDOW, WATCH  # noqa: E402
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402

NAME = "benchattack"
BUSY = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
ATTACKS = {
    "busy loops": BUSY,
    **test_neighbours.LOUD,
    "fork bomb": with_values(test_bombs.FORK_BOMB, name=NAME, bound=10**9),
    "memory": with_values(test_bombs.MEMORY_TOGETHER, processes=12, mib=60, wait_s=60),
    "output": with_values(test_bombs.OUTPUT, fd=1),
    **{
        f"all of {kind}": with_values(test_user_counts.TAKE, kinds=[kind], name=NAME, hold_s=60)
        for kind in ("pipe", "signal_to_itself")
    },
}
FORK_ATTACKS = {
    "questions during forks": test_neighbours.CHANNEL + test_neighbours.QUESTIONS,
    **{
        f"fork: {kind}": test_neighbours.CHANNEL
        + with_values(WATCH, name=NAME)
        + code
        + "guest._fork_process = attack"
        for kind, code in IN_THE_WINDOW.items()
    },
}
FIGURES = ("call-p50", "call-max", "fork-max")
ATTACK_LIMIT_S = 2.0
DEADLINE_S = 120.0


def case_names() -> list[str]:
    """Return the names of all cases in the order in which they run."""
    stateless = [f"stateless/{kind}/{figure}" for kind in ATTACKS for figure in FIGURES[:2]]
    kinds = (*ATTACKS, *FORK_ATTACKS)
    return stateless + [f"stateful/{kind}/{figure}" for kind in kinds for figure in FIGURES]


class Neighbour:
    """Code that must not notice the attack; measures its latencies."""

    def __init__(self, runner: SandboxPool | SandboxSession, *, stateful: bool) -> None:
        self._runner = runner
        self._stateful = stateful
        self._count = 0

    async def measure(self, num_calls: int) -> dict[str, float]:
        """Return the figures of `num_calls` calls; raise `RuntimeError` for a wrong answer."""
        calls, forks = [], []
        for number in range(num_calls):
            self._count += 1
            count = self._count if self._stateful else 1
            code = "count = globals().get('count', 0) + 1; print(count)"
            calls.append(await self._measure_s(self._run_checked(self._runner, code, count)))
            if self._stateful and number % 5 == 0:
                forks.append(await self._measure_s(self._fork(count)))
            await asyncio.sleep(0.02)
        longest_s = (max(calls), max(forks, default=0.0))
        return dict(zip(FIGURES, (statistics.median(calls), *longest_s), strict=True))

    async def _fork(self, count: int) -> None:
        child = await self._runner.fork()  # type: ignore[union-attr]
        await self._run_checked(child, "print(count)", count)
        await child.close()

    @staticmethod
    async def _run_checked(runner: SandboxPool | SandboxSession, code: str, expected: int) -> None:
        result = await runner.run(code, DEADLINE_S)
        if (result.status.value, result.output) != ("ok", str(expected)):
            raise RuntimeError(f"got {result}, expected {expected}")

    @staticmethod
    async def _measure_s(running: Awaitable[None]) -> float:
        begin = time.perf_counter()
        await running
        return time.perf_counter() - begin


async def attack_stateless(pool: SandboxPool, code: str) -> None:
    """Run an attack again and again until cancelled."""
    while True:
        await pool.run(code, ATTACK_LIMIT_S)


async def attack_stateful(session: SandboxSession, code: str, *, forks: bool) -> None:
    """Run an attack again and again until cancelled, or fork a session that it has taken over."""
    while True:
        await session.run(code, ATTACK_LIMIT_S)
        while forks:
            with contextlib.suppress(RuntimeError):
                await (await session.fork()).close()


@contextlib.asynccontextmanager
async def under_attack(attack: Awaitable[None]) -> AsyncIterator[None]:
    """Run an attack beside the block, from a moment before it."""
    running = asyncio.ensure_future(attack)
    await asyncio.sleep(0.3)
    try:
        yield
        if running.done():
            running.result()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def measure_attack(
    pool: SandboxPool, kind: str, num_calls: int, *, stateful: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of a neighbour under an attack, and alone."""
    if not stateful:
        neighbour = Neighbour(pool, stateful=False)
        alone = await neighbour.measure(num_calls)
        async with under_attack(attack_stateless(pool, ATTACKS[kind])):
            return await neighbour.measure(num_calls), alone
    attacker, other = await test_neighbours.open_two(pool)
    neighbour = Neighbour(other, stateful=True)
    alone = await neighbour.measure(num_calls)
    code = (ATTACKS | FORK_ATTACKS)[kind]
    async with under_attack(attack_stateful(attacker, code, forks=kind in FORK_ATTACKS)):
        attacked = await neighbour.measure(num_calls)
    for session in (attacker, other):
        await session.close()
    return attacked, alone


async def measure_all(chosen: Sequence[str], num_calls: int) -> None:
    """Print the line of each case."""
    from mega_agentrl.config.enums import PythonMode
    from mega_agentrl.config.sections.tools import PythonToolConfig
    from mega_agentrl.sandbox.pool import SandboxPool

    for mode in PythonMode:
        cases = [case.split("/") for case in chosen if case.startswith(f"{mode}/")]
        if not cases:
            continue
        config = PythonToolConfig(
            mode=mode, num_workers=3, preload_modules=[], memory_limit_mib=128
        )
        pool = SandboxPool(config)
        await pool.start()
        try:
            for kind in dict.fromkeys(kind for _, kind, _ in cases):
                stateful = mode is PythonMode.stateful
                attacked, alone = await measure_attack(pool, kind, num_calls, stateful=stateful)
                for figure in (figure for _, other, figure in cases if other == kind):
                    case = f"{mode}/{kind}/{figure}"
                    line = bench_line("neighbours", case, "s", attacked[figure], alone[figure])
                    print(json.dumps(line), flush=True)
            if pool.num_replaced:
                raise RuntimeError(f"{pool.num_replaced} sandboxes were lost")
        finally:
            await pool.close()


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--calls", type=int, default=40)
    args = parse_options(
        parser, arguments, cases=["stateless/busy loops/*", "stateful/fork bomb/*"], calls=4
    )
    try:
        chosen = select_cases(args.cases, case_names())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asyncio.run(measure_all(chosen, args.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
