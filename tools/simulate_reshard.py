r"""Plans a weight update for a real model on many ranks, from its config alone.

    python tools/simulate_reshard.py                         all models below, with their sizes
    python tools/simulate_reshard.py --model qwen3-30b-a3b --trainer tensor=8,expert=8 \
        --rollout tensor=4,engines=2 --per-node 8 --network-gbs 25
    python tools/simulate_reshard.py --model path/to/config.json ...

One layer of each type is traced through vLLM's loader and repeated (`planner.owner_expansion`); the
plan covers all ranks and tensors. No weights, processes or GPU are needed. The tool prints bytes,
the lower bound of network traffic, the minimum time (a rank's own bytes over one network link), the
predicted time (`planner.traffic`: links only) and published times of other systems.
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

from mega_agentrl.reshard.layout import ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.owner_expansion import (
    TrainerParallelSizes,
    expand_rollout_owners,
    expand_trainer_owners,
    first_layer_of_each_type,
)
from mega_agentrl.reshard.planner.planner import plan_from_owners
from mega_agentrl.reshard.planner.regions import RankSetCache, RectOwners
from mega_agentrl.reshard.planner.traffic import TransferTraffic, count_traffic
from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation

CONFIGS = Path(__file__).resolve().parent / "model_configs"


class Case(NamedTuple):
    """A model, the parallel sizes of both sides, and published times in seconds."""

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


class SimulationResult(NamedTuple):
    """Result of one case."""

    traffic: TransferTraffic
    own_bytes: int
    """Bytes of the largest rollout rank's shards."""
    ratio: float
    """Received bytes / own bytes, of the rank whose ratio is farthest from 1."""
    model_bytes: int
    num_buckets: int
    trace_s: float
    plan_s: float
    """CPU seconds of planning, without tracing and counting."""


def simulate(case: Case, args: argparse.Namespace) -> SimulationResult:
    """Trace, plan and count one case."""
    path = Path(case.model)
    path = path if path.is_file() else CONFIGS / f"{case.model}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise ValueError(f"--model {case.model}: expected a config.json or one of {known}")
    shape, engine, trace_s = _trace(path, case.rollout["tensor"], args.dtype)
    sizes = TrainerParallelSizes(**{f"{axis}_size": size for axis, size in case.trainer.items()})
    num_rollout_ranks = case.rollout["tensor"] * case.rollout["engines"]
    locations = _locations(sizes.num_ranks, num_rollout_ranks, args.per_node, args.colocated)
    start = time.process_time()
    rank_sets = RankSetCache()
    trainer_owners = expand_trainer_owners(shape, sizes, rank_sets)
    engines = case.rollout["engines"]
    rollout_owners = expand_rollout_owners(
        shape, engine, engines, rank_sets, first_rank=sizes.num_ranks
    )
    shapes = hf_shapes(shape)
    plan = plan_from_owners(
        trainer_owners, rollout_owners, rank_sets, locations, args.dtype,
        names=list(shapes), num_trainer_ranks=sizes.num_ranks,
        bucket_bytes=args.bucket_mib * 2**20, speeds=args.speeds,
    )  # fmt: skip
    plan_s = time.process_time() - start
    traffic = count_traffic(plan, locations, args.speeds)
    own = _own_bytes(rollout_owners, DTYPE_BYTES[args.dtype])
    ratios = {traffic.received_bytes_of(rank) / own[rank] for rank in plan.rollout_ranks}
    return SimulationResult(
        traffic=traffic,
        own_bytes=max(own.values()),
        ratio=max(ratios, key=lambda ratio: abs(ratio - 1.0)),
        model_bytes=DTYPE_BYTES[args.dtype] * sum(map(_numel, shapes.values())),
        num_buckets=len(plan.buckets),
        trace_s=trace_s,
        plan_s=plan_s,
    )


def _trace(
    path: Path, tensor_size: int, dtype: str
) -> tuple[ModelShape, list[list[ShardLayout]], float]:
    """Return the shape of the whole model, and an engine's layouts of one layer of each type."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from mega_agentrl.generator.weights.loader_trace import trace_engine_layouts

    config = json.loads(path.read_text(encoding="utf-8"))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        shape = ModelShape.from_folder(folder)
        file.write_text(json.dumps(sample_config(config, shape)), encoding="utf-8")
        engine = trace_engine_layouts(folder, tensor_size, dtype)
    return shape, engine, time.perf_counter() - start


def sample_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the config of the model with one layer of each type."""
    chosen = first_layer_of_each_type(shape)
    changes: dict[str, Any] = {"num_hidden_layers": len(chosen)}
    if shape.moe:
        dense = [index for index, layer in enumerate(chosen) if not shape.is_moe_layer(layer)]
        changes |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return {key: value for key, value in config.items() if key != "layer_types"} | changes


def _locations(
    num_trainer_ranks: int, num_rollout_ranks: int, per_node: int, colocated: bool
) -> list[RankLocation]:
    """Fill machines in order of rank; rollout ranks share the trainer's machines or follow."""
    first = 0 if colocated else -(-num_trainer_ranks // per_node)
    locations = [
        RankLocation(rank // per_node, rank % per_node) for rank in range(num_trainer_ranks)
    ]
    return locations + [
        RankLocation(first + rank // per_node, rank % per_node) for rank in range(num_rollout_ranks)
    ]


def _own_bytes(rollout_owners: RectOwners, item_bytes: int) -> dict[int, int]:
    """Return the bytes of every rollout rank's shards."""
    # Layers of a type share their table of rectangles.
    tables = {id(rects): rects for rects in rollout_owners.values()}
    times: dict[int, int] = defaultdict(int)
    for rects in rollout_owners.values():
        times[id(rects)] += 1
    own: dict[int, int] = defaultdict(int)
    for key, rects in tables.items():
        for rect, ranks in rects.items():
            for rank in ranks:
                own[rank] += times[key] * rect.numel * item_bytes
    return own


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def format_case(case: Case, result: SimulationResult, speeds: LinkSpeeds) -> str:
    """Return the printed lines of one case."""
    traffic, gib = result.traffic, 2**30
    trainer = ", ".join(f"{key} {value}" for key, value in case.trainer.items())
    rollout = ", ".join(f"{key} {value}" for key, value in case.rollout.items())
    network = traffic.total_bytes(LinkType.network) / gib
    same_node = traffic.total_bytes(LinkType.same_node) / gib
    same_gpu = traffic.total_bytes(LinkType.same_gpu) / gib
    own_s = result.own_bytes / speeds.network
    model_s = result.model_bytes / speeds.network
    return (
        f"{case.model}: trainer {trainer} -> rollout {rollout}\n"
        f"  model {result.model_bytes / gib:.2f} GiB; largest rollout shard "
        f"{result.own_bytes / gib:.3f} GiB; received / own {result.ratio:.4f}\n"
        f"  network {network:.2f} GiB, at least {traffic.min_network_bytes / gib:.2f}; same node "
        f"{same_node:.2f}; same GPU {same_gpu:.2f}; sent by the trainer "
        f"{traffic.trainer_sent_bytes() / gib:.2f}\n"
        f"  predicted {traffic.predicted_s:.3f} s; over one network link: own bytes {own_s:.3f} s, "
        f"whole model {model_s:.3f} s; published {case.published}\n"
        f"  {result.num_buckets} buckets; traced in {result.trace_s:.1f} s, planned in "
        f"{result.plan_s:.1f} s of CPU time"
    )


def _numbers(text: str) -> dict[str, int]:
    """Parse `tensor=8,data=2`."""
    return {key: int(value) for key, value in (item.split("=") for item in text.split(","))}


def _cases(args: argparse.Namespace) -> Sequence[Case]:
    known = {case.model: case for case in CASES}
    if not args.model:
        return CASES
    case = known.get(args.model, Case(args.model, {}, {}))
    return [
        case._replace(
            trainer=args.trainer or case.trainer or {"tensor": 1},
            rollout={"tensor": 1, "engines": 1} | (args.rollout or case.rollout),
        )
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="name in tools/model_configs, or a config.json")
    parser.add_argument("--trainer", type=_numbers, help="tensor=,pipeline=,data=,expert=")
    parser.add_argument("--rollout", type=_numbers, help="tensor=,engines=")
    parser.add_argument("--colocated", action="store_true", help="on the trainer's devices")
    parser.add_argument("--per-node", type=int, default=8, help="ranks a machine")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    parser.add_argument("--bucket-mib", type=int, default=64)
    for link in LinkType:
        default = getattr(LinkSpeeds(), link) / 1e9
        flag = f"--{link.replace('_', '-')}-gbs"
        parser.add_argument(flag, type=float, default=default, help="GB/s per rank and direction")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the cases and print them; return 2 for sizes that do not fit."""
    args = _parser().parse_args(arguments)
    gc.disable()  # planning creates millions of small objects without cycles
    try:
        speeds = {str(link): getattr(args, f"{link}_gbs") * 1e9 for link in LinkType}
        args.speeds = LinkSpeeds(**speeds)
        for case in _cases(args):
            print(format_case(case, simulate(case, args), args.speeds), flush=True)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    return 0


if __name__ == "__main__":
    sys.exit(main())
