"""Benchmarks rollouts with slow tools: streaming collection against lock-step rounds.

    python tools/bench_rollout.py [--quick] [--model FOLDER] [--prompts N] [--flight N]
        [--batches N]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. The baseline
collects rollouts as the released ARPO code does (`rollout.branching=released`): a batch of prompts
in rounds, each of which waits for its slowest request and tool call, one batch after the other.
Ours keeps the same number of trajectories in flight and starts a prompt as soon as its trajectories
fit (`rollout.branching=after_result`). Both use the same engine, prompts, seed and group size, and
the real tools, whose answers are delayed (`delayed_tools`). Cases:

    stream/rate       seconds per trajectory over all prompts
    stream/idle       fraction of the time in which the engine had no request
    stream/sampled    tokens sampled per trajectory
    stream/prefilled  tokens per trajectory that the engine computed without sampling them
    stream/leaked     asyncio tasks that still exist at the end
    batch/wall        seconds for a single batch, median over different batches
    latency/mean      mean seconds of a tool call, which must be about equal on both sides

The model must call tools: by default the one that `make smoke` leaves in runs/smoke/model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import Branching, Truncation
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.config.sections.tools import PythonToolConfig, SearchToolConfig, ToolConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.generator.environment import set_vllm_environment
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.context import make_rollout_context
from mega_agentrl.tool.toolkit import build_toolkit

if TYPE_CHECKING:
    from mega_agentrl.tool.toolkit import ToolKit
    from mega_agentrl.types.protocols import Generator, ToolProvider, ToolSession
    from mega_agentrl.types.records import GenerateRequest, Generation, Prompt, ToolOutcome

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.delayed_tools import DelayedTools  # noqa: E402
from tools.measurement import bench_line, parse_options  # noqa: E402

line = partial(bench_line, "rollout")
CONFIG = RolloutConfig(group_size=4, max_response_tokens=96, max_turns=6)
MAX_MODEL_LEN = 160


@dataclass
class RolloutCounts:
    """Counts of one side of the benchmark; `idle_s` is the time without a running request."""

    num_running: int = 0
    idle_s: float = 0.0
    idle_since: float = field(default_factory=time.perf_counter)
    num_sampled: int = 0
    num_prefilled: int = 0
    num_sessions: int = 0
    latencies_s: list[float] = field(default_factory=list)


class CountingGenerator:
    """Counts the requests, tokens and idle time of an engine."""

    def __init__(self, engine: Generator, counts: RolloutCounts) -> None:
        self._engine = engine
        self._counts = counts

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate, counting tokens and idle time."""
        counts = self._counts
        if not counts.num_running:
            counts.idle_s += time.perf_counter() - counts.idle_since
        counts.num_running += 1
        try:
            generation = await self._engine.generate(request)
        finally:
            counts.num_running -= 1
            counts.idle_since = time.perf_counter()
        counts.num_sampled += len(generation.token_ids)
        counts.num_prefilled += len(request.token_ids) - generation.num_cached_tokens
        return generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class CountingTools:
    """Counts the open sessions of `tools` and measures the latency of their calls."""

    def __init__(self, tools: ToolProvider, counts: RolloutCounts) -> None:
        self.counts = counts
        self._tools = tools
        self._changed = asyncio.Condition()

    def open_session(self) -> ToolSession:
        """Open a session, which counts as open once its tools are created."""
        return CountingToolSession(self._tools.open_session(), self)

    async def wait_for_room(self, num_trajectories: int, limit: int) -> None:
        """Wait until `num_trajectories` more trajectories fit under `limit` open ones."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.counts.num_sessions + num_trajectories <= limit
            )

    async def add_sessions(self, change: int) -> None:
        """Add `change` (1 or -1) to the number of open sessions."""
        async with self._changed:
            self.counts.num_sessions += change
            self._changed.notify_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tools, name)


class CountingToolSession:
    """A session of `CountingTools`."""

    def __init__(self, session: ToolSession, tools: CountingTools) -> None:
        self._session = session
        self._tools = tools
        self._is_open = False

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the tools and count the session as open."""
        await self._enter()
        await self._session.create(tools_kwargs)

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Execute the call and record its latency."""
        begin = time.perf_counter()
        outcome = await self._session.execute(tool, arguments)
        self._tools.counts.latencies_s.append(time.perf_counter() - begin)
        return outcome

    async def fork(self) -> CountingToolSession:
        """Fork the session and count the child as open."""
        child = CountingToolSession(await self._session.fork(), self._tools)
        await child._enter()
        return child

    async def release(self) -> None:
        """Release the tools; may be called twice."""
        await self._session.release()
        if self._is_open:
            self._is_open = False
            await self._tools.add_sessions(-1)

    async def _enter(self) -> None:
        self._is_open = True
        await self._tools.add_sessions(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """A live engine with live tools, and both ways to collect rollouts with them."""

    engine: Generator
    tools: ToolKit
    codec: HFCodec
    flight: int

    async def lock_step(self, prompts: Sequence[Prompt], counts: RolloutCounts, step: str) -> float:
        """Collect batch after batch in lock-step rounds and return the seconds taken."""
        tools = CountingTools(DelayedTools(self.tools), counts)
        size = self.flight // CONFIG.group_size
        begin = time.perf_counter()
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            await self._collect(batch, tools, counts, Branching.released, step)
        return time.perf_counter() - begin

    async def stream(self, prompts: Sequence[Prompt], counts: RolloutCounts, step: str) -> float:
        """Start each prompt as soon as its trajectories fit and return the seconds taken."""
        tools = CountingTools(DelayedTools(self.tools), counts)
        begin = time.perf_counter()

        async def collect_prompt(prompt: Prompt) -> None:
            await self._collect([prompt], tools, counts, Branching.after_result, step)

        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                await tools.wait_for_room(CONFIG.group_size, self.flight)
                tasks.create_task(collect_prompt(prompt))
                await asyncio.sleep(0)  # the task starts and opens the sessions of its roots
        return time.perf_counter() - begin

    async def _collect(
        self,
        prompts: Sequence[Prompt],
        tools: ToolProvider,
        counts: RolloutCounts,
        branching: Branching,
        step: str,
    ) -> None:
        trees = await collect_rollouts(
            prompts,
            WeightedRubric(RewardConfig()),
            make_rollout_context(
                generator=CountingGenerator(self.engine, counts),
                tools=tools,
                codec=self.codec,
                config=replace(CONFIG, branching=branching),
                max_model_len=MAX_MODEL_LEN,
                seed=1,
                step=step,
            ),
        )
        trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
        assert len(trajectories) == len(prompts) * CONFIG.group_size, "a group is not complete"
        assert not any(item.failed for item in trajectories), "engine or tools failed; see log"


@asynccontextmanager
async def open_bench(args: argparse.Namespace, folder: Path) -> AsyncIterator[BenchSetup]:
    """Start an engine and the tools, and close them at the end."""
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, cpu_kv_cache_gib=1)
    set_vllm_environment(config, log_path=folder / "vllm.log")
    from mega_agentrl.generator.engine import Engine

    codec = HFCodec(str(args.model))
    tools = build_toolkit(
        ToolConfig(
            python=PythonToolConfig(num_workers=8, preload_modules=[]),
            search=SearchToolConfig(source=str(args.data / "corpus.jsonl")),
        ),
        codec,
        control_tokens=codec.control_tokens,
    )
    engine = await Engine().start(config, str(args.model), seed=0, load_weights=True)
    try:
        await tools.start()
        yield BenchSetup(engine=engine, tools=tools, codec=codec, flight=args.flight)
    finally:
        await tools.close()
        await engine.close()


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run both sides and return the JSON lines of all cases."""
    async with open_bench(args, folder) as bench:
        loaded = load_prompts(
            [DataFile(str(args.data / "train.parquet"))],
            bench.codec,
            DataConfig(max_prompt_tokens=32, truncation=Truncation.drop),
            key="--data",
        )
        prompts = loaded.prompts[: args.prompts]
        size = args.flight // CONFIG.group_size
        # One batch lasts as long as its slowest tool calls, which are a matter of chance.
        starts = range(0, min(args.batches * size, len(prompts)), size)
        batches = [prompts[start : start + size] for start in starts]
        sides = (bench.stream, bench.lock_step)
        for side in sides:  # the first requests are slower
            await side(prompts[:2], RolloutCounts(), "warm")
        batch_walls = [
            statistics.median([await side(batch, RolloutCounts(), "alone") for batch in batches])
            for side in sides
        ]
        walls, counts, leaked = [], [], []
        for side in sides:
            before = len(asyncio.all_tasks())
            counts.append(RolloutCounts())
            walls.append(await side(prompts, counts[-1], "stream"))
            leaked.append(len(asyncio.all_tasks()) - before)
    total = len(prompts) * CONFIG.group_size
    return [
        line("stream/rate", "s", *(wall / total for wall in walls)),
        line("stream/idle", "share", *(c.idle_s / w for c, w in zip(counts, walls, strict=True))),
        line("stream/sampled", "tokens", *(c.num_sampled / total for c in counts)),
        line("stream/prefilled", "tokens", *(c.num_prefilled / total for c in counts)),
        line("stream/leaked", "tasks", *leaked),
        line("batch/wall", "s", *batch_walls),
        line("latency/mean", "s", *(statistics.fmean(c.latencies_s or [0]) for c in counts)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print one JSON line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "runs/smoke/model")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/toolqa")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--flight", type=int, default=64, help="trajectories at a time")
    parser.add_argument("--batches", type=int, default=8, help="batches of batch/wall")
    args = parse_options(parser, arguments, prompts=4, flight=8, batches=1)
    for path in (args.model / "config.json", args.data / "train.parquet"):
        if not path.exists():
            print(f"bench_rollout: no file {path}; `make smoke` creates it", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        lines = asyncio.run(measure(args, Path(folder)))
    for result in lines:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # At a normal exit of the interpreter vLLM aborts if its engine is still shutting down.
    os._exit(code)
