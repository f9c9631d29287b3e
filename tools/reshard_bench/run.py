"""Measures memory, transfers and updates of all paths, with real trainer ranks and a real engine.

The engine runs in the process that imports this module, whose environment must have been prepared
for vLLM (`generator.environment`).
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.generator import engine as engine_module
from mega_agentrl.generator.engine import Engine
from mega_agentrl.generator.engine_args import engine_args
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.session import TransferSession
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    collect_regions,
    regions_of_layout,
)
from mega_agentrl.reshard.verify.weight_probe import probe_prompt
from tools.reshard_bench.baselines import BASELINES, OURS, OURS_WITHOUT_PROOF, plan_buckets
from tools.reshard_bench.model import num_params, trainer_layouts
from tools.reshard_bench.trainer import ADDRESS, TIMEOUT_S, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.config.sections.runtime import EngineConfig

MIB = 1 << 20
PROBE_TOKENS = 32
PROOF_PAIRS = 4
"""Pairs of updates with and without the proof, per repeat."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Seconds of one update."""

    wall_s: float
    trainer_s: float
    """CPU seconds of all trainer processes."""
    workers_s: float
    """CPU seconds of all workers."""
    packing_s: float
    """CPU seconds of the worker that packed longest."""
    copies_s: float
    """CPU seconds of copying, including the proof if there is one."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return self.trainer_s + self.workers_s

    def __str__(self) -> str:
        return (
            f"{self.wall_s:.3f} s; CPU seconds: trainer {self.trainer_s:.3f}, workers "
            f"{self.workers_s:.3f}, packing {self.packing_s:.3f}, copies {self.copies_s:.4f}"
        )


def _bench_args(*arguments: Any, **keywords: Any) -> Any:
    """Return the engine's arguments with the worker methods of the benchmark.

    The engine serves random weights until the first update, which may be a baseline's.
    """
    return replace(
        engine_args(*arguments, **keywords),
        load_format="dummy",
        worker_extension_cls="tools.reshard_bench.worker.BenchExtension",
    )


async def run(
    cases: Sequence[Any],
    results: Any,
    folder: Path,
    config: EngineConfig,
    repeats: int,
    bucket_bytes: int,
) -> None:
    """Measure everything that the cases need, and add it to `results`."""
    engine_module.engine_args = _bench_args
    engine = Engine()
    trainer = Trainer(folder, len(trainer_layouts(ModelShape.from_folder(folder))))
    try:
        await engine.start(config, str(folder), seed=1, load_weights=True)
        bench = ReshardBench(engine, trainer, folder, bucket_bytes, results)
        await bench.prepare()
        for transport in dict.fromkeys(case.transport for case in cases):
            transport_cases = [case for case in cases if case.transport == transport]
            kinds = {case.kind for case in transport_cases}
            names = {case.baseline for case in transport_cases}
            baselines = [baseline for baseline in BASELINES if baseline in names]
            await bench.measure(transport, kinds, baselines, repeats)
    finally:
        trainer.close()
        await engine.close()


class ReshardBench:
    """Runs measurements on a started trainer and engine."""

    def __init__(
        self, engine: Engine, trainer: Trainer, folder: Path, bucket_bytes: int, results: Any
    ) -> None:
        self._engine, self._trainer, self._results = engine, trainer, results
        self._shape = ModelShape.from_folder(folder)
        self._bucket_bytes = bucket_bytes
        self._trainer_layouts = trainer_layouts(self._shape)
        self._versions = itertools.count(1)
        self._keys = itertools.count()
        self._answers: set[tuple[float, ...]] = set()
        self._verify_s = 0.0
        self._prompt = probe_prompt(self._shape.vocab_size, PROBE_TOKENS)
        shapes = hf_shapes(self._shape)
        self._buckets = {
            baseline: plan_buckets(baseline, self._trainer_layouts, shapes, bucket_bytes)
            for baseline in BASELINES
        }

    async def prepare(self) -> None:
        """Read the layouts, install the timing, and open the store."""
        layouts = await self._engine.layout()
        self._rollout_layouts = [packed.unpack() for packed, _ in layouts]
        self._regions = collect_regions(self._rollout_layouts)
        self._verifier = DigestVerifier(self._trainer_layouts, self._regions)
        self._region_indices = [
            self._verifier.region_indices(regions_of_layout(layout))
            for layout in self._rollout_layouts
        ]
        await self._workers("bench_install")
        self._port = self._trainer.call("open")[0]
        self._trainer.call("meet", self._port)
        print_note(f"nccl_m2n is not measured: {m2n_absence()}")
        print_note(
            f"{num_params(self._shape) / 1e6:.0f} M parameters, {len(self._regions)} regions"
        )

    async def measure(
        self, transport: str, kinds: set[str], baselines: list[str], repeats: int
    ) -> None:
        """Measure everything over one transport.

        Memory comes first, because it counts buffers that stay afterwards.
        """
        paths = (OURS, *baselines)
        for path in paths:
            await self._memory(transport, path)
        await self._connect(transport, OURS)
        if "transfer" in kinds:
            await self._workers("bench_exclude", ["packing", "proof"])
            for repeat in range(repeats + 1):
                for path in paths:
                    seconds = await self._transfer(path)
                    if repeat:  # the first time connects and touches memory
                        self._results.add("transfer", transport, path, seconds)
        if kinds & {"update", "packing"}:
            for repeat in range(repeats):
                for path, spent in await self._updates(transport, paths, repeat):
                    self._results.add("update", transport, path, spent.wall_s)
                    self._results.add("packing", transport, path, spent.packing_s)
        if "proof" in kinds:
            for repeat in range(PROOF_PAIRS * repeats + 1):
                pair = dict(await self._updates(transport, (OURS, OURS_WITHOUT_PROOF), repeat))
                if repeat:  # the first time touches memory
                    added_s = pair[OURS].copies_s - pair[OURS_WITHOUT_PROOF].copies_s
                    self._results.add("proof", transport, OURS, added_s / pair[OURS].cpu_s)
        await self._workers("bench_exclude", [])

    # ---- phases ---------------------------------------------------------------------------

    async def _memory(self, transport: str, path: str) -> None:
        self._trainer.call("leave")
        await self._workers("bench_start_peak")
        self._trainer.call("start_peak")
        received = await self._connect(transport, path)
        if path == OURS:
            await self._receive_only(transport)
        await self._update(path)
        peaks = {
            "rollout": await self._workers("bench_peak"),
            "trainer": self._trainer.call("peak"),
        }
        if path == OURS:
            spent = await self._workers("bench_read_timings")
            received = [worker["received_bytes"] for worker in spent]
        self._results.add("received", transport, path, max(received) / MIB)
        for side, values in peaks.items():
            self._results.add(f"memory/{side}", transport, path, max(values))

    async def _receive_only(self, transport: str) -> None:
        """Measure the memory of the transport alone, discarding the values that arrive."""
        version = next(self._versions)
        self._trainer.start("send", version, False)
        await self._workers("bench_receive_only", version)
        await asyncio.to_thread(self._trainer.collect)
        self._results.add("slots", transport, OURS, max(await self._workers("bench_peak")))

    async def _updates(
        self, transport: str, paths: Sequence[str], repeat: int
    ) -> list[tuple[str, UpdateCost]]:
        """Update to new weights by every path in turn, and return the cost of each update."""
        self._trainer.call("advance")
        # The order is reversed every time, so that coming first or last is no advantage.
        order = paths[:: 1 - 2 * (repeat % 2)]
        costs, answers = [], {}
        for path in order:
            await self._workers("bench_exclude", ["proof"] if path == OURS_WITHOUT_PROOF else [])
            costs.append((path, await self._one_update(path)))
            print_note(f"update/{transport}/{path}: {costs[-1][1]}")
            answers[path] = await self._engine.compute_prompt_log_probs(self._prompt)
            await self._engine.resume()
        distinct = set(map(tuple, answers.values()))
        if len(distinct) != 1 or distinct & self._answers:
            raise RuntimeError(
                f"log-probs of the prompt by path: {answers}; expected the same new ones from all; "
                "probable cause: a path that delivers other weights than the trainer's"
            )
        self._answers |= distinct
        return costs

    async def _one_update(self, path: str) -> UpdateCost:
        trainer_s, workers_s = await self._cpu_s()
        wall_s = await self._update(path)
        spent = await self._workers("bench_read_timings")
        copies_s = 0.0
        if path in (OURS, OURS_WITHOUT_PROOF):
            label = "proof" if path == OURS else "without proof"
            copies_s = sum(worker["cpu_s"].get(label, 0.0) for worker in spent)
            copies_s += sum(self._trainer.call("proof_s"))
            copies_s += self._verify_s if path == OURS else 0.0
        return UpdateCost(
            wall_s=wall_s,
            trainer_s=sum(self._trainer.call("cpu_s")) - trainer_s,
            workers_s=sum(worker["process_s"] for worker in spent) - workers_s,
            packing_s=max(worker["cpu_s"].get("packing", 0.0) for worker in spent),
            copies_s=copies_s,
        )

    # ---- one movement ---------------------------------------------------------------------

    async def _connect(self, transport: str, path: str) -> list[int]:
        """Connect all ranks; return the bytes that rollout ranks will receive, if known."""
        key = f"{path}-{next(self._keys)}"
        if path != OURS:
            buckets = self._buckets[path]
            self._trainer.start("join_baseline", path, buckets, key, len(self._rollout_layouts))
            answer = await self._workers(
                "bench_join_baseline", path, pickle.dumps(buckets), key, ADDRESS, self._port
            )
            await asyncio.to_thread(self._trainer.collect)
            return answer
        locations = (RankLocation(0),) * (len(self._trainer_layouts) + len(self._rollout_layouts))
        names = list(hf_shapes(self._shape))
        plan = plan_transfer(
            self._trainer_layouts, self._rollout_layouts, locations, "float32",
            names=names, bucket_bytes=self._bucket_bytes,
        )  # fmt: skip
        session = TransferSession(
            address=ADDRESS,
            port=self._port,
            key=key,
            plan=plan,
            timeout_s=TIMEOUT_S,
            locations=locations,
            transport=TransportKind.gloo if transport == "gloo" else TransportKind.auto,
        )
        self._trainer.start("join", session, self._regions)
        await self._engine.join_weight_transfer(session, len(self._trainer_layouts))
        await asyncio.to_thread(self._trainer.collect)
        return []

    async def _transfer(self, path: str) -> float:
        await self._workers("bench_begin")
        version = next(self._versions)
        start_s = time.perf_counter()
        if path == OURS:
            self._trainer.start("send", version, False)
            await self._workers("bench_receive", version)
        else:
            self._trainer.start("send_baseline", path)
            await self._workers("bench_receive_baseline", path)
        await asyncio.to_thread(self._trainer.collect)
        seconds = time.perf_counter() - start_s
        await self._workers("bench_end")
        return seconds

    async def _update(self, path: str) -> float:
        """Return the seconds from pause to serving."""
        start_s = time.perf_counter()
        await self._engine.pause()
        if path in (OURS, OURS_WITHOUT_PROOF):
            await self._update_ours(next(self._versions), proof=path == OURS)
        else:
            await self._workers("bench_begin")
            self._trainer.start("send_baseline", path)
            await self._workers("bench_receive_baseline", path)
            await asyncio.to_thread(self._trainer.collect)
            await self._workers("bench_end")
        await self._engine.resume()
        return time.perf_counter() - start_s

    async def _update_ours(self, version: int, *, proof: bool) -> None:
        self._trainer.start("send", version, proof)
        await self._engine.receive_weights(version)
        rank_digests = await asyncio.to_thread(self._trainer.collect)
        expected: list[Any] = [None] * len(self._rollout_layouts)
        if proof:
            start_s = time.thread_time()
            digests = self._verifier.expected_digests(rank_digests)
            self._verify_s = time.thread_time() - start_s
            expected = [digests[numbers] for numbers in self._region_indices]
        await self._engine.verify_weights(version, expected)

    # ---- the workers ----------------------------------------------------------------------

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        answers = await self._engine.call_workers(method, *arguments)
        for worker, (failure, _) in enumerate(answers):
            if failure is not None:
                raise RuntimeError(f"worker {worker}, {method}:\n{failure}")
        return [answer for _, answer in answers]

    async def _cpu_s(self) -> tuple[float, float]:
        spent = await self._workers("bench_read_timings")
        return sum(self._trainer.call("cpu_s")), sum(worker["process_s"] for worker in spent)


def m2n_absence() -> str:
    """Return why vLLM's own resharding backend is not measured."""
    if not torch.cuda.is_available():
        return "no GPU"
    from vllm.distributed.weight_transfer.m2n_common import import_m2n

    try:
        import_m2n()
    except ImportError as error:
        return str(error)
    return "its trainer has one mesh for all parameters, no pipeline stages; this bench has two"


def print_note(text: str) -> None:
    """Print a line that is not a result to stderr."""
    sys.stderr.write(f"bench_reshard: {text}\n")
