"""Benchmarks weight updates of a vLLM engine against verl's and slime's, one JSON line per case.

    python tools/bench_reshard.py [--quick] [--cases PATTERN ...] [--repeats N] [--bucket-mib N]
        [sizes]
    python tools/bench_reshard.py --join RANKS ...

Trainer: 4 processes, TP 2 x PP 2, that hold the shards of a random Qwen3 as Megatron splits it.
Engine: a real vLLM engine with TP 2. The paths alternate over the same processes, and times are
medians. Cases are KIND/TRANSPORT/BASELINE; a pattern is a shell pattern over the whole name:

    transfer   seconds until every byte is written, without the engine's own packing, which both
               paths need, and without the proof, which only our path has
    update     seconds from pause to serving, including everything except the trainer's half of
               the probe, which needs a model there
    packing    CPU seconds that a worker needs to pack weights for its kernels
    received   MiB that a rollout rank receives
    memory     MiB at the peak of an update above what was resident before any buffer existed:
               memory/trainer and memory/rollout, the maximum over ranks. A trainer's slots that
               a worker maps count for the trainer. Compiling the digest's kernel, which takes
               about 120 MiB once in a process without a GPU, is not counted
    slots      MiB at the peak of receiving and dropping everything, on a rollout rank: the part
               of memory/rollout that belongs to the transport; the rest are modules whose weights
               are incomplete. `baseline` is the target, two buckets
    proof      share of the proof in the CPU seconds that trainer and workers spend on our update:
               copying with digests, computing and comparing digests, less the same copies in an
               update without the proof, each timed in its thread (ranks outnumber cores, so this
               is its share of the time as well). Median over four pairs of updates per repeat, in
               direct succession, since after an update by another path pages must be touched
               again; `baseline` is the target, 0.05. Whole processes are not compared, because
               whether vLLM's packing gets huge pages changes their time by more than the proof

TRANSPORT is how our bytes are sent; BASELINE is the framework whose weight update is compared, see
`reshard_bench/baselines.py`. After an update, log-probs of a fixed prompt must be equal bit by bit
for every path. A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours;
everything else is printed to stderr.

With `--join` only these cases are measured, for each number of processes, on this machine:

    join/RANKS         seconds until all have joined a session; `baseline` is a gloo group of all of
                       them, which connects each with every other
    connections/RANKS  TCP connections between them

vLLM's own `nccl_m2n` is not compared, and the tool prints why: it needs a package that vLLM does
not depend on, and one mesh for all of the trainer's parameters, so it supports no pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402
from tools.reshard_bench.baselines import BASELINES, OURS  # noqa: E402
from tools.reshard_bench.model import ModelSizes, write_folder  # noqa: E402

KINDS = {
    "transfer": "s",
    "update": "s",
    "packing": "s",
    "received": "MiB",
    "memory/trainer": "MiB",
    "memory/rollout": "MiB",
}
UNCOMPARED_KINDS = {"slots": "MiB", "proof": "share"}
"""Kinds that are compared with a target instead of a baseline."""
PROOF_TARGET = 0.05
"""Maximum share of the proof in an update."""
TRANSPORTS = ("gloo", "shared_memory")
DEFAULT_SIZES = ModelSizes(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32_768,
)
QUICK_SIZES = ModelSizes(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=2048,
)


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    kind: str
    transport: str
    baseline: str | None
    """Path to compare with, or None for a target."""

    @property
    def name(self) -> str:
        """KIND/TRANSPORT/BASELINE."""
        return "/".join(filter(None, (self.kind, self.transport, self.baseline)))


def all_cases(transports: Sequence[str]) -> list[Case]:
    """Return all cases of this machine."""
    cases = []
    for transport in transports:
        cases += [Case(kind, transport, baseline) for kind in KINDS for baseline in BASELINES]
        cases += [Case(kind, transport, None) for kind in UNCOMPARED_KINDS]
    return cases


class BenchResults:
    """Measured values by (kind, transport, path); a path is "ours" or a baseline."""

    def __init__(self, bucket_mib: int) -> None:
        self._bucket_mib = bucket_mib
        self._values: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, kind: str, transport: str, path: str, value: float) -> None:
        """Record one value."""
        self._values[kind, transport, path].append(value)

    def median(self, kind: str, transport: str, path: str) -> float:
        """Return the median of the recorded values."""
        return statistics.median(self._values[kind, transport, path])

    def line(self, case: Case) -> dict[str, object]:
        """Return the JSON line of a case."""
        if case.kind == "slots":
            ours = self.median(case.kind, case.transport, OURS)
            baseline = 2.0 * self._bucket_mib
        elif case.kind == "proof":
            ours, baseline = self.median(case.kind, case.transport, OURS), PROOF_TARGET
        else:
            ours = self.median(case.kind, case.transport, OURS)
            baseline = self.median(case.kind, case.transport, case.baseline)
        return bench_line(
            "reshard", case.name, (KINDS | UNCOMPARED_KINDS)[case.kind], ours, baseline
        )


def measure(chosen: Sequence[Case], args: argparse.Namespace, sizes: ModelSizes) -> Iterator[Any]:
    """Start all processes, measure what the cases need, and yield their lines."""
    from mega_agentrl.config.sections.runtime import EngineConfig
    from mega_agentrl.generator.environment import set_vllm_environment

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_folder(folder, sizes)
        config = EngineConfig(
            tensor_parallel_size=2, max_model_len=256, cpu_kv_cache_gib=1, max_num_seqs=8
        )
        set_vllm_environment(config, log_path=Path(scratch) / "vllm.log")
        from tools.reshard_bench.run import run

        results = BenchResults(args.bucket_mib)
        asyncio.run(run(chosen, results, folder, config, args.repeats, args.bucket_mib << 20))
    for case in chosen:
        yield results.line(case)


def measure_joins(counts: Sequence[int]) -> Iterator[Any]:
    """Yield two lines for each number of ranks."""
    from tools.reshard_bench.join import measure_join

    for num_ranks in counts:
        costs = measure_join(num_ranks)
        ours, mesh = costs["session"], costs["mesh"]
        yield bench_line("reshard", f"join/{num_ranks}", "s", ours.wall_s, mesh.wall_s)
        yield bench_line(
            "reshard",
            f"connections/{num_ranks}",
            "connections",
            ours.num_connections,
            mesh.num_connections,
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--join", nargs="+", type=int, default=[], metavar="RANKS")
    for field in fields(ModelSizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(DEFAULT_SIZES, field.name))
    args = parse_options(parser, arguments, repeats=1, bucket_mib=1, **asdict(QUICK_SIZES))
    cases = {case.name: case for case in all_cases(TRANSPORTS)}
    try:
        chosen = [cases[name] for name in select_cases(args.cases, list(cases))]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = ModelSizes(**{field.name: getattr(args, field.name) for field in fields(ModelSizes)})
    # gloo and vLLM write to standard output, which is reserved for the result.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measured = measure_joins(args.join) if args.join else measure(chosen, args, sizes)
    for line in measured:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
