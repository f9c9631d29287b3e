"""Drives trainer and engine through memory, transfers and updates by either path.

The driver hosts the engine, so this module is for a process whose environment is prepared for
vLLM (`generator.environment`).
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

from mega_agentrl.batch.probe import probe_prompt
from mega_agentrl.generator import engine as engine_module
from mega_agentrl.generator.engine import Engine
from mega_agentrl.generator.engine_args import engine_args
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.proof import Court, all_regions, regions_of
from mega_agentrl.reshard.transport import WeightLink
from tools.reshard_bench.model import num_params, trainer_layouts
from tools.reshard_bench.trainer import ADDRESS, TIMEOUT_S, Trainer
from tools.reshard_bench.usual import BARE, OURS, PEERS, schedule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.config.schema import EngineConfig

MIB = 1 << 20
PROBE_TOKENS = 32
PROOF_PAIRS = 4
"""Pairs of updates with and without the proof, for each repeat."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one update took: seconds on the clock, and of processors.

    trainer_s, workers_s: of all processes of that side. packing_s: of the worker that packed
    longest. copies_s: copying, and where there is a proof what that needs.
    """

    wall_s: float
    trainer_s: float
    workers_s: float
    packing_s: float
    copies_s: float

    @property
    def cpu_s(self) -> float:
        """Of all processes."""
        return self.trainer_s + self.workers_s

    def __str__(self) -> str:
        return (
            f"{self.wall_s:.3f} s; CPU seconds: trainer {self.trainer_s:.3f}, workers "
            f"{self.workers_s:.3f}, packing {self.packing_s:.3f}, copies {self.copies_s:.4f}"
        )


def _bench_args(*arguments: Any, **keywords: Any) -> Any:
    """The product's arguments, with random weights and the bench's methods in the workers."""
    return replace(
        engine_args(*arguments, **keywords),
        load_format="dummy",
        worker_extension_cls="tools.reshard_bench.worker.BenchExtension",
    )


async def run(
    chosen: Sequence[Any],
    results: Any,
    folder: Path,
    config: EngineConfig,
    repeats: int,
    bucket_bytes: int,
) -> None:
    """Fill the results with all that the chosen cases need."""
    engine_module.engine_args = _bench_args
    engine = Engine()
    trainer = Trainer(folder, len(trainer_layouts(ModelShape.from_folder(folder))))
    try:
        await engine.start(config, str(folder), seed=1)
        bench = Bench(engine, trainer, folder, bucket_bytes, results)
        await bench.prepare()
        for wire in dict.fromkeys(case.wire for case in chosen):
            kinds = {case.kind for case in chosen if case.wire == wire}
            peers = [p for p in PEERS if any(c.peer == p and c.wire == wire for c in chosen)]
            await bench.measure(wire, kinds, peers, repeats)
    finally:
        trainer.close()
        await engine.close()


class Bench:
    """Both sides, started."""

    def __init__(
        self, engine: Engine, trainer: Trainer, folder: Path, bucket_bytes: int, results: Any
    ) -> None:
        self._engine, self._trainer, self._results = engine, trainer, results
        self._shape = ModelShape.from_folder(folder)
        self._bucket_bytes = bucket_bytes
        self._sources = trainer_layouts(self._shape)
        self._versions = itertools.count(1)
        self._keys = itertools.count()
        self._answers: set[tuple[float, ...]] = set()
        self._court_s = 0.0
        self._prompt = probe_prompt(self._shape.vocab, PROBE_TOKENS)
        self._parcels = {
            peer: schedule(peer, self._sources, hf_shapes(self._shape), bucket_bytes)
            for peer in PEERS
        }

    async def prepare(self) -> None:
        """Layouts, watches and the meeting point."""
        found = await self._engine.layout()
        self._sinks = [layout for layout, _ in found]
        self._regions = all_regions(self._sinks)
        self._court = Court(self._sources, self._regions)
        self._numbers = [self._court.numbers_of(regions_of(layout)) for layout in self._sinks]
        await self._workers("bench_install")
        self._port = self._trainer.call("open")[0]
        self._trainer.call("meet", self._port)
        note(f"nccl_m2n is not measured: {m2n_absence()}")
        note(f"{num_params(self._shape) / 1e6:.0f} M parameters, {len(self._regions)} regions")

    async def measure(self, wire: str, kinds: set[str], peers: list[str], repeats: int) -> None:
        """Everything over one wire. Memory comes first: it counts buffers that stay afterwards."""
        paths = (OURS, *peers)
        for path in paths:
            await self._memory(wire, path)
        await self._connect(wire, OURS)
        if "transfer" in kinds:
            await self._workers("bench_leave_out", ["packing", "proof"])
            for repeat in range(repeats + 1):
                for path in paths:
                    seconds = await self._transfer(path)
                    if repeat:  # the first time connects and touches memory
                        self._results.add("transfer", wire, path, seconds)
        if kinds & {"update", "packing"}:
            for repeat in range(repeats):
                for path, spent in await self._updates(wire, paths, repeat):
                    self._results.add("update", wire, path, spent.wall_s)
                    self._results.add("packing", wire, path, spent.packing_s)
        if "proof" in kinds:
            for repeat in range(PROOF_PAIRS * repeats + 1):
                pair = dict(await self._updates(wire, (OURS, BARE), repeat))
                if repeat:  # the first time touches memory
                    added_s = pair[OURS].copies_s - pair[BARE].copies_s
                    self._results.add("proof", wire, OURS, added_s / pair[OURS].cpu_s)
        await self._workers("bench_leave_out", [])

    # ---- phases ---------------------------------------------------------------------------

    async def _memory(self, wire: str, path: str) -> None:
        self._trainer.call("leave")
        await self._workers("bench_start_peak")
        self._trainer.call("start_peak")
        received = await self._connect(wire, path)
        if path == OURS:
            await self._receive_only(wire)
        await self._update(path)
        peaks = {
            "rollout": await self._workers("bench_peak"),
            "trainer": self._trainer.call("peak"),
        }
        if path == OURS:
            spent = await self._workers("bench_spent")
            received = [worker["received_bytes"] for worker in spent]
        self._results.add("received", wire, path, max(received) / MIB)
        for side, values in peaks.items():
            self._results.add(f"memory/{side}", wire, path, max(values))

    async def _receive_only(self, wire: str) -> None:
        """What the transport alone needs: nothing is put anywhere."""
        version = next(self._versions)
        self._trainer.start("send", version, False)
        await self._workers("bench_receive_only", version)
        await asyncio.to_thread(self._trainer.collect)
        self._results.add("slots", wire, OURS, max(await self._workers("bench_peak")))

    async def _updates(
        self, wire: str, paths: Sequence[str], repeat: int
    ) -> list[tuple[str, Spent]]:
        """New weights by every path, one after the other; what each update took."""
        self._trainer.call("advance")
        # Turned round every time: to come first or last is no advantage.
        order = paths[:: 1 - 2 * (repeat % 2)]
        found, answers = [], {}
        for path in order:
            await self._workers("bench_leave_out", ["proof"] if path == BARE else [])
            found.append((path, await self._one_update(path)))
            note(f"update/{wire}/{path}: {found[-1][1]}")
            answers[path] = await self._engine.probe(self._prompt)
            await self._engine.resume()
        distinct = set(map(tuple, answers.values()))
        if len(distinct) != 1 or distinct & self._answers:
            raise RuntimeError(f"a path brought other weights than the trainer's: {answers}")
        self._answers |= distinct
        return found

    async def _one_update(self, path: str) -> Spent:
        trainer_s, workers_s = await self._cpu_s()
        wall_s = await self._update(path)
        spent = await self._workers("bench_spent")
        copies_s = 0.0
        if path in (OURS, BARE):
            label = "proof" if path == OURS else "without proof"
            copies_s = sum(worker["cpu_s"].get(label, 0.0) for worker in spent)
            copies_s += sum(self._trainer.call("proof_s"))
            copies_s += self._court_s if path == OURS else 0.0
        return Spent(
            wall_s=wall_s,
            trainer_s=sum(self._trainer.call("cpu_s")) - trainer_s,
            workers_s=sum(worker["process_s"] for worker in spent) - workers_s,
            packing_s=max(worker["cpu_s"].get("packing", 0.0) for worker in spent),
            copies_s=copies_s,
        )

    # ---- one movement ---------------------------------------------------------------------

    async def _connect(self, wire: str, path: str) -> list[int]:
        """Let all ranks meet; returns the bytes that rollout ranks will receive, if known."""
        key = f"{path}-{next(self._keys)}"
        if path != OURS:
            parcels = self._parcels[path]
            self._trainer.start("join_usual", path, parcels, key, len(self._sinks))
            answer = await self._workers(
                "bench_join_usual", path, pickle.dumps(parcels), key, ADDRESS, self._port
            )
            await asyncio.to_thread(self._trainer.collect)
            return answer
        places = (Location(0),) * (len(self._sources) + len(self._sinks))
        names = list(hf_shapes(self._shape))
        plan = plan_delivery(
            self._sources, self._sinks, places, "float32",
            names=names, bucket_bytes=self._bucket_bytes,
        )  # fmt: skip
        link = WeightLink(
            address=ADDRESS,
            port=self._port,
            key=key,
            plan=plan,
            timeout_s=TIMEOUT_S,
            locations=() if wire == "gloo" else places,
        )
        self._trainer.start("join", link, self._regions)
        await self._engine.connect_weights(link)
        await asyncio.to_thread(self._trainer.collect)
        return []

    async def _transfer(self, path: str) -> float:
        await self._workers("bench_begin")
        version = next(self._versions)
        start_s = time.perf_counter()
        if path == OURS:
            self._trainer.start("send", version, False)
            await self._workers("bench_move", version)
        else:
            self._trainer.start("send_usual", path)
            await self._workers("bench_move_usual", path)
        await asyncio.to_thread(self._trainer.collect)
        seconds = time.perf_counter() - start_s
        await self._workers("bench_end")
        return seconds

    async def _update(self, path: str) -> float:
        """Seconds from pause to serving."""
        start_s = time.perf_counter()
        await self._engine.pause()
        if path in (OURS, BARE):
            await self._update_ours(next(self._versions), proof=path == OURS)
        else:
            await self._workers("bench_begin")
            self._trainer.start("send_usual", path)
            await self._workers("bench_move_usual", path)
            await asyncio.to_thread(self._trainer.collect)
            await self._workers("bench_end")
        await self._engine.resume()
        return time.perf_counter() - start_s

    async def _update_ours(self, version: int, *, proof: bool) -> None:
        self._trainer.start("send", version, proof)
        await self._engine.receive_weights(version)
        testimonies = await asyncio.to_thread(self._trainer.collect)
        expected: list[Any] = [None] * len(self._sinks)
        if proof:
            start_s = time.thread_time()
            digests = self._court.expected(testimonies)
            self._court_s = time.thread_time() - start_s
            expected = [digests[numbers] for numbers in self._numbers]
        await self._engine.confirm_weights(version, expected)

    # ---- the workers ----------------------------------------------------------------------

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        found = await self._engine._llm.collective_rpc(method, args=arguments)
        for worker, (failure, _) in enumerate(found):
            if failure is not None:
                raise RuntimeError(f"worker {worker}, {method}:\n{failure}")
        return [answer for _, answer in found]

    async def _cpu_s(self) -> tuple[float, float]:
        spent = await self._workers("bench_spent")
        return sum(self._trainer.call("cpu_s")), sum(worker["process_s"] for worker in spent)


def m2n_absence() -> str:
    """Why vLLM's own resharding backend is no second baseline."""
    if not torch.cuda.is_available():
        return "no GPU"
    from vllm.distributed.weight_transfer.m2n_common import import_m2n

    try:
        import_m2n()
    except ImportError as error:
        return str(error)
    return "its trainer has one mesh for all parameters, no pipeline stages; this bench has two"


def note(text: str) -> None:
    """What is no result."""
    sys.stderr.write(f"bench_reshard: {text}\n")
