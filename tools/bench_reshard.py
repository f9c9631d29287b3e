"""Weight update of a vLLM engine by our bridge against the usual path, one JSON line a case.

    python tools/bench_reshard.py [--cases PATTERN ...] [--repeats N] [--bucket-mib N] [sizes]

Trainer: 4 processes, TP 2 x PP 2, that hold the shards of a random Qwen3 as Megatron cuts it.
Engine: a real vLLM engine with TP 2. Both paths run in turns over the same processes, and a time
is the median. Cases are KIND/WIRE/PEER, a pattern is a shell pattern over the whole name:

    transfer   seconds until every byte has landed; without the engine's own packing, which both
               pay, and without the proof, which only we have
    update     seconds from pause to serving, everything included (the trainer's half of the
               probe aside: it needs a model there)
    packing    CPU seconds of that which a worker needs to pack for its kernels
    received   MiB that a rollout rank receives
    memory     MiB at the peak of an update above what was resident before any buffer existed;
               memory/trainer and memory/rollout, the largest over ranks; a trainer's slots that
               a worker reads where they are count for the trainer; not counted is the compiler
               of the digest's loop, some 120 MiB once in a process without a GPU
    slots      MiB at the peak of receiving and dropping everything, on a rollout rank: what of
               memory/rollout is the transport's, the rest being modules that are under way into
               the engine; `baseline` is the target, two buckets
    proof      what of the CPU seconds that trainer and workers spend on our update is for the
               proof: copying with digests, testifying and comparing, less the same copies in an
               update without it, each timed in its thread (ranks outnumber cores, so that is its
               share of the time as well). The median over four pairs of updates for each repeat,
               one right after the other, as an update by another path leaves pages to be touched
               anew, with the proof or without; `baseline` is the target, 0.05. Whole processes
               are not compared: whether vLLM's packing gets large pages moves their seconds by
               more than the proof takes

WIRE is how our bytes travel; PEER is whose usual path it is, see `reshard_bench/usual.py`. Where
the workers serve after an update, log-probs of a fixed prompt must be the same, bit by bit, by
every path. A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours; what
else was seen is on stderr.

vLLM's own `nccl_m2n` is no baseline here, and the tool says why: it needs a package that vLLM does
not bring, and one mesh that all of the trainer's parameters lie on, so it knows no pipeline.
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
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.bench_line import bench_line  # noqa: E402
from tools.reshard_bench.model import Sizes, write_folder  # noqa: E402
from tools.reshard_bench.usual import OURS, PEERS  # noqa: E402

KINDS = {
    "transfer": "s",
    "update": "s",
    "packing": "s",
    "received": "MiB",
    "memory/trainer": "MiB",
    "memory/rollout": "MiB",
}
ALONE = {"slots": "MiB", "proof": "share"}
"""Kinds that are compared with a target."""
PROOF_TARGET = 0.05
WIRES = ("gloo", "mapped")
DEFAULT_SIZES = Sizes(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32_768,
)


@dataclass(frozen=True)
class Case:
    """One line. peer: None where it is not compared with a path."""

    kind: str
    wire: str
    peer: str | None

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.kind, self.wire, self.peer)))


def cases(wires: Sequence[str]) -> list[Case]:
    """All of this machine."""
    found = []
    for wire in wires:
        found += [Case(kind, wire, peer) for kind in KINDS for peer in PEERS]
        found += [Case(kind, wire, None) for kind in ALONE]
    return found


class Results:
    """Measured values by (kind, wire, path); path is "ours" or a peer."""

    def __init__(self, bucket_mib: int) -> None:
        self._bucket_mib = bucket_mib
        self._values: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, kind: str, wire: str, path: str, value: float) -> None:
        self._values[kind, wire, path].append(value)

    def median(self, kind: str, wire: str, path: str) -> float:
        return statistics.median(self._values[kind, wire, path])

    def line(self, case: Case) -> dict[str, object]:
        """The JSON line of a case."""
        if case.kind == "slots":
            ours = self.median(case.kind, case.wire, OURS)
            baseline = 2.0 * self._bucket_mib
        elif case.kind == "proof":
            ours, baseline = self.median(case.kind, case.wire, OURS), PROOF_TARGET
        else:
            ours = self.median(case.kind, case.wire, OURS)
            baseline = self.median(case.kind, case.wire, case.peer)
        return bench_line("reshard", case.name, (KINDS | ALONE)[case.kind], ours, baseline)


def measure(chosen: Sequence[Case], given: argparse.Namespace, sizes: Sizes) -> Iterator[Any]:
    """Start everything, measure what the cases need, yield their lines."""
    from mega_agentrl.config.schema import EngineConfig
    from mega_agentrl.generator.environment import set_environment

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_folder(folder, sizes)
        config = EngineConfig(tensor=2, max_model_len=256, kv_cache_gib=1, max_concurrent=8)
        set_environment(config, log_path=Path(scratch) / "vllm.log")
        from tools.reshard_bench.run import run

        results = Results(given.bucket_mib)
        asyncio.run(run(chosen, results, folder, config, given.repeats, given.bucket_mib << 20))
    for case in chosen:
        yield results.line(case)


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=64)
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(DEFAULT_SIZES, field.name))
    given = parser.parse_args(arguments)
    patterns = [part for text in given.cases for part in text.split(",")]
    offered = cases(WIRES)
    chosen = [case for case in offered if any(fnmatchcase(case.name, p) for p in patterns)]
    if not chosen:
        sys.stderr.write(
            f"--cases {' '.join(patterns)}: none of\n  "
            + "\n  ".join(case.name for case in offered)
            + "\n"
        )
        return 2
    sizes = Sizes(**{field.name: getattr(given, field.name) for field in fields(Sizes)})
    # gloo and vLLM write to the standard output, which is for our lines alone.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in measure(chosen, given, sizes):
        lines.write(json.dumps(line) + "\n")
        lines.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
