"""Plans a weight update for a real model on many ranks, from its config alone.

    python tools/simulate_reshard.py                         all models below, with their cuts
    python tools/simulate_reshard.py --model qwen3-30b-a3b --trainer tensor=8,expert=8 \
        --rollout tensor=4,engines=2 --per-node 8 --network-gbs 25
    python tools/simulate_reshard.py --model path/to/config.json ...

One layer of each kind is traced through vLLM's loader and repeated (`reshard.repetition`); the
plan itself is the one for all ranks and tensors. No weights, no processes, no GPU. Prints bytes,
the network's lower bound, the floor (a rank's own bytes over one network link), the predicted
time (`reshard.traffic`: links only) and the peers' published times, theirs on their hardware.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mega_agentrl.reshard.delivery import ITEM_BYTES
from mega_agentrl.reshard.layout import ShardLayout
from mega_agentrl.reshard.links import Link, LinkSpeeds, Location
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import plan_owned
from mega_agentrl.reshard.regions import Owned, RankSets
from mega_agentrl.reshard.repetition import (
    TrainerCut,
    kinds,
    repeated_sinks,
    repeated_sources,
)
from mega_agentrl.reshard.traffic import Traffic, count_traffic

CONFIGS = Path(__file__).resolve().parent / "model_configs"


class Case(NamedTuple):
    """A model, both sides' cuts and what others published for it (seconds)."""

    model: str
    trainer: dict[str, int]
    rollout: dict[str, int]
    published: str = "-"


CASES = (
    Case(
        "qwen3-4b",
        {"tensor": 2, "data": 4},
        {"tensor": 1, "engines": 8},
        "NeMo-RL 0.21-0.34 (H100)",
    ),
    Case(
        "qwen3-30b-a3b",
        {"tensor": 4, "data": 4, "expert": 16},
        {"tensor": 4, "engines": 4},
        "NeMo-RL 0.74-1.00 (H100)",
    ),
    Case(
        "qwen2.5-72b",
        {"tensor": 8, "pipeline": 4, "data": 2},
        {"tensor": 8, "engines": 8},
    ),
    Case(
        "qwen3-235b-a22b",
        {"tensor": 4, "pipeline": 8, "data": 8, "expert": 32},
        {"tensor": 8, "engines": 32},
        "SkyRL 3.5, checkpoint-engine 6.2 (8 H800), verl 23.7 (H20)",
    ),
    Case(
        "deepseek-v3-sized",
        {"tensor": 8, "pipeline": 16, "data": 8, "expert": 64},
        {"tensor": 32, "engines": 32},
        "NeMo-RL 2.4-2.8 (H100)",
    ),
)


class Outcome(NamedTuple):
    """own_bytes: of the largest rollout rank's shards. plan_s: processor time of the plan,
    tracing and counting not included.
    """

    traffic: Traffic
    own_bytes: int
    ratio: float
    model_bytes: int
    num_buckets: int
    trace_s: float
    plan_s: float


def simulate(case: Case, options: argparse.Namespace) -> Outcome:
    """Trace, plan and count one case."""
    path = Path(case.model)
    path = path if path.is_file() else CONFIGS / f"{case.model}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise ValueError(f"--model {case.model}: expected a config.json or one of {known}")
    shape, engine, trace_s = _trace(path, case.rollout["tensor"], options.dtype)
    cut = TrainerCut(**case.trainer)
    num_sinks = case.rollout["tensor"] * case.rollout["engines"]
    locations = _locations(cut.num_ranks, num_sinks, options.per_node, options.colocated)
    start = time.process_time()
    sets = RankSets()
    held = repeated_sources(shape, cut, sets)
    engines = case.rollout["engines"]
    wanted = repeated_sinks(shape, engine, engines, sets, first_rank=cut.num_ranks)
    shapes = hf_shapes(shape)
    plan = plan_owned(
        held, wanted, sets, locations, options.dtype,
        names=list(shapes), num_sources=cut.num_ranks,
        bucket_bytes=options.bucket_mib * 2**20, speeds=options.speeds,
    )  # fmt: skip
    plan_s = time.process_time() - start
    traffic = count_traffic(plan, locations, options.speeds)
    own = _own_bytes(wanted, ITEM_BYTES[options.dtype])
    ratios = {traffic.received_by(rank) / own[rank] for rank in plan.sinks}
    return Outcome(
        traffic=traffic,
        own_bytes=max(own.values()),
        ratio=max(ratios, key=lambda ratio: abs(ratio - 1.0)),
        model_bytes=ITEM_BYTES[options.dtype] * sum(map(_numel, shapes.values())),
        num_buckets=len(plan.buckets),
        trace_s=trace_s,
        plan_s=plan_s,
    )


def _trace(
    path: Path, tensor_size: int, dtype: str
) -> tuple[ModelShape, list[list[ShardLayout]], float]:
    """The whole model's shape, and an engine's layouts of one layer of each kind."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from mega_agentrl.generator.trace import trace_destinations

    config = json.loads(path.read_text(encoding="utf-8"))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        shape = ModelShape.from_folder(folder)
        file.write_text(json.dumps(sample_config(config, shape)), encoding="utf-8")
        engine = trace_destinations(folder, tensor_size, dtype)
    return shape, engine, time.perf_counter() - start


def sample_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The config of the model with one layer of each kind."""
    chosen = kinds(shape)
    changes: dict[str, Any] = {"num_hidden_layers": len(chosen)}
    if shape.moe:
        dense = [index for index, layer in enumerate(chosen) if not shape.is_sparse(layer)]
        changes |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return {key: value for key, value in config.items() if key != "layer_types"} | changes


def _locations(num_sources: int, num_sinks: int, per_node: int, colocated: bool) -> list[Location]:
    """Machines are filled in the order of ranks; rollout ranks on the trainer's, or after them."""
    first = 0 if colocated else -(-num_sources // per_node)
    places = [Location(rank // per_node, rank % per_node) for rank in range(num_sources)]
    return places + [
        Location(first + rank // per_node, rank % per_node) for rank in range(num_sinks)
    ]


def _own_bytes(wanted: Owned, item_bytes: int) -> dict[int, int]:
    """Bytes of every rollout rank's shards. Layers of a kind share their table of rectangles."""
    tables = {id(rects): rects for rects in wanted.values()}
    times: dict[int, int] = defaultdict(int)
    for rects in wanted.values():
        times[id(rects)] += 1
    own: dict[int, int] = defaultdict(int)
    for key, rects in tables.items():
        for rect, ranks in rects.items():
            for rank in ranks:
                own[rank] += times[key] * rect.numel * item_bytes
    return own


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def report(case: Case, outcome: Outcome, speeds: LinkSpeeds) -> str:
    """A few lines about one case."""
    traffic, gib = outcome.traffic, 2**30
    sizes = [f"{key} {value}" for key, value in case.trainer.items()]
    rollout = [f"{key} {value}" for key, value in case.rollout.items()]
    network = traffic.total(Link.network)
    floor_s = outcome.own_bytes / speeds.network
    usual_s = outcome.model_bytes / speeds.network
    return "\n".join(
        [
            f"{case.model}: trainer {', '.join(sizes)} -> rollout {', '.join(rollout)}",
            f"  model {outcome.model_bytes / gib:.2f} GiB; largest rollout shard "
            f"{outcome.own_bytes / gib:.3f} GiB; received / own {outcome.ratio:.4f}",
            f"  network {network / gib:.2f} GiB, at least "
            f"{traffic.least_network_bytes / gib:.2f}; same node "
            f"{traffic.total(Link.same_node) / gib:.2f}; same GPU "
            f"{traffic.total(Link.same_gpu) / gib:.2f}; sent by the trainer "
            f"{traffic.sent_by_trainer() / gib:.2f}",
            f"  predicted {traffic.seconds:.3f} s; own bytes over one network link "
            f"{floor_s:.3f} s; the whole model over one {usual_s:.3f} s; published "
            f"{case.published}",
            f"  {outcome.num_buckets} buckets; traced in {outcome.trace_s:.1f} s, planned in "
            f"{outcome.plan_s:.1f} s of processor time",
        ]
    )


def _numbers(text: str) -> dict[str, int]:
    """`tensor=8,data=2` as a dict."""
    return {key: int(value) for key, value in (item.split("=") for item in text.split(","))}


def _cases(options: argparse.Namespace) -> Sequence[Case]:
    known = {case.model: case for case in CASES}
    if not options.model:
        return CASES
    case = known.get(options.model, Case(options.model, {}, {}))
    return [
        case._replace(
            trainer=options.trainer or case.trainer or {"tensor": 1},
            rollout={"tensor": 1, "engines": 1} | (options.rollout or case.rollout),
        )
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="name in tools/model_configs, or a config.json")
    parser.add_argument("--trainer", type=_numbers, help="tensor=,pipeline=,data=,expert=")
    parser.add_argument("--rollout", type=_numbers, help="tensor=,engines=")
    parser.add_argument("--colocated", action="store_true", help="on the trainer's devices")
    parser.add_argument("--per-node", type=int, default=8, help="ranks a machine")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16")
    parser.add_argument("--bucket-mib", type=int, default=64)
    for link in Link:
        default = getattr(LinkSpeeds(), link) / 1e9
        flag = f"--{link.replace('_', '-')}-gbs"
        parser.add_argument(flag, type=float, default=default, help="GB/s per rank and direction")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, simulate, print; 2 for sizes that do not fit."""
    options = _parser().parse_args(arguments)
    gc.disable()  # millions of small objects that all stay, and no cycles
    try:
        given = {str(link): getattr(options, f"{link}_gbs") * 1e9 for link in Link}
        options.speeds = LinkSpeeds(**given)
        for case in _cases(options):
            print(report(case, simulate(case, options), options.speeds), flush=True)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    return 0


if __name__ == "__main__":
    sys.exit(main())
