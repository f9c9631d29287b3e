r"""Plans a weight update for a real model on many ranks, from its config alone.

    python tools/simulate_reshard.py                    all cases below and all recipes
    python tools/simulate_reshard.py --quick            the two smallest of them, in seconds
    python tools/simulate_reshard.py --case qwen3_32b_64gpu
    python tools/simulate_reshard.py --model qwen3-30b-a3b --trainer tensor=8,expert=8 \
        --rollout tensor=4,engines=2 --per-node 8 --network-gbs 25
    python tools/simulate_reshard.py --model path/to/config.json ...

Prints one JSON line per case, and ends with code 1 if a bound is broken:

    open_gib       memory that a rollout rank has open: modules that are begun but not complete, and
                   two buckets; at most `open_limit_gib`, the two largest modules and two buckets
    peers_max      ranks that a rank exchanges bytes with, by direction; at most `peers_limit`
    setup_s        CPU seconds of a worker's trace, and of the driver's plan with the
                   serialization of its parts; at most 60 (`SETUP_LIMIT_S`) up to 512 + 256 ranks
    replace_s      CPU seconds of the driver for a replaced engine on another machine: a link to
                   that engine, and then one to all engines; at most 10 (`REPLACE_LIMIT_S`) up to
                   512 + 256 ranks
    predicted_s    time on the links (`planner.traffic`); `floor_s` is the time of a rank's own
                   bytes over one network link, `published` the seconds that other projects report
    copies_max     slices that a rollout rank copies to its parameters in an update;
                   `copy_calls_max` calls copy and digest them, each one launch on a GPU
    received_ratio received / own bytes, of the rank whose ratio is farthest from 1
    network_gib    bytes between machines, at least `min_network_gib`
    connections    TCP connections of all ranks in a session, to each other and to the store (a full
                   mesh of 768 ranks has 294,528); `connections_max` is the most of a rank, at most
                   two for each of the `peers_limit` peers by direction, and one
    groups_max     process groups that a trainer rank creates; at most 14 (`GROUPS_LIMIT`)
    store_requests requests of all ranks to the store in a join, of which one each waits for the
                   others: the join's only barrier
    control_mib    bytes of the parts of the plan that the driver serializes for a join, each once;
                   at most 128 (`CONTROL_LIMIT_MIB`) up to 512 + 256 ranks

One layer of each type is traced through vLLM's loader and repeated; the plan covers all ranks and
tensors and is made as in a run (`reshard.link_planner`). No weights, processes or GPU are needed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.weight_transfer import plan_rank_locations, trainer_parallel_sizes
from mega_agentrl.reshard.frames import FrameCodec
from mega_agentrl.reshard.layout import Block, ShardLayout, distinct_layouts
from mega_agentrl.reshard.link_planner import Layout, LinkPlan, LinkPlanner
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.owner_expansion import (
    TrainerParallelSizes,
    first_layer_of_each_type,
)
from mega_agentrl.reshard.planner.traffic import count_traffic, max_open_bytes, module_bytes
from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES, TransferPlan
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.preflight_parts.compose import compose_config, make_config_only_folder  # noqa: E402

CONFIGS = ROOT / "tools" / "model_configs"
PEERS_LIMIT = 32
SETUP_LIMIT_S = 60.0
REPLACE_LIMIT_S = 10.0
GROUPS_LIMIT = 14
CONTROL_LIMIT_MIB = 128.0
MAX_RANKS_WITH_LIMITS = 512 + 256
GIB = 2**30


class Case(NamedTuple):
    """A model, the parallel sizes of both sides, and published times in seconds."""

    name: str
    model: str
    trainer: dict[str, int]
    rollout: dict[str, int]
    published: str = ""
    bucket_mib: int = 64
    colocated: bool = False


CASES = (
    Case(
        "4b",
        "qwen3-4b",
        {"tensor": 2, "data": 4},
        {"tensor": 1, "engines": 8},
        "NeMo-RL 0.21-0.34 (H100)",
    ),
    Case(
        "30b-a3b",
        "qwen3-30b-a3b",
        {"tensor": 4, "data": 4, "expert": 16},
        {"tensor": 4, "engines": 4},
        "NeMo-RL 0.74-1.00 (H100)",
    ),
    Case(
        "72b",
        "qwen2.5-72b",
        {"tensor": 8, "pipeline": 4, "data": 2},
        {"tensor": 8, "engines": 8},
    ),
    Case(
        "235b-a22b",
        "qwen3-235b-a22b",
        {"tensor": 4, "pipeline": 2, "data": 32, "expert": 64},
        {"tensor": 8, "engines": 32},
        "SkyRL 3.5, checkpoint-engine 6.2 (8 H800), verl 23.7 (H20)",
    ),
    Case(
        "235b-a22b-768",
        "qwen3-235b-a22b",
        {"tensor": 4, "pipeline": 2, "data": 64, "expert": 128},
        {"tensor": 8, "engines": 32},
    ),
    Case(
        "deepseek-v3",
        "deepseek-v3-sized",
        {"tensor": 8, "pipeline": 16, "data": 8, "expert": 32},
        {"tensor": 32, "engines": 32},
        "NeMo-RL 2.4-2.8 (H100)",
    ),
)
RECIPES = {
    "ares_7b": "qwen2.5-vl-7b",
    "arpo_7b_reasoning": "qwen2.5-7b",
    "arpo_8b_deepsearch": "qwen3-8b",
    "arpo_14b_deepsearch": "qwen3-14b",
    "egpo_qwen3_4b": "qwen3-4b",
    "qwen2_5_7b_8gpu": "qwen2.5-7b",
    "qwen2_5_72b_64gpu": "qwen2.5-72b",
    "qwen2_5_72b_128gpu": "qwen2.5-72b",
    "qwen2_5_72b_32k_64gpu": "qwen2.5-72b",
    "qwen3_32b_64gpu": "qwen3-32b",
    "qwen3_30b_a3b_32gpu": "qwen3-30b-a3b",
    "qwen3_235b_a22b_512gpu": "qwen3-235b-a22b",
}
"""Experiments in configs/ that train a released model, with the config of that model."""
QUICK_CASES = ("4b", "egpo_qwen3_4b")


class Sides(NamedTuple):
    """The layouts of all ranks of a case."""

    shape: ModelShape
    trainer_layouts: list[Layout]
    engine_layouts: list[list[Layout]]
    trace_s: float
    """CPU seconds that a worker needs to trace the whole model."""


def recipe_case(name: str) -> Case:
    """Return the case of an experiment in configs/, with its sizes."""
    model = RECIPES[name]
    unset = ("data.train=unset", "data.validation=unset", "tool.search.source=http://unset")
    with tempfile.TemporaryDirectory() as folder:
        path = make_config_only_folder(CONFIGS / f"{model}.json", Path(folder))
        overrides = [f"experiment={name}", *unset]
        config = compose_config(overrides, model_path=path)
        sizes = trainer_parallel_sizes(config, ModelShape.from_folder(path))
    return Case(
        name,
        model,
        {
            "tensor": sizes.tensor_size,
            "pipeline": sizes.pipeline_size,
            "data": sizes.data_size,
            "expert": sizes.expert_size,
        },
        {"tensor": config.engine.tensor_parallel_size, "engines": config.cluster.num_engines},
        bucket_mib=config.weight_sync.bucket_mib,
        colocated=config.cluster.colocated,
    )


def simulate(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Trace, plan and count one case; return the fields of its line."""
    sizes = TrainerParallelSizes(**{f"{axis}_size": size for axis, size in case.trainer.items()})
    engines, tensor = case.rollout["engines"], case.rollout["tensor"]
    sides = _make_sides(case, sizes, args.dtype)
    locations = plan_rank_locations(
        sizes.num_ranks, tensor, engines, args.per_node, colocated=case.colocated
    )
    bucket_bytes = case.bucket_mib * 2**20
    start_s = time.process_time()
    planner = LinkPlanner(list(hf_shapes(sides.shape)), args.dtype, bucket_bytes)
    link_plan = planner.plan(sides.trainer_layouts, sides.engine_layouts, locations)
    control_bytes = _serialize(link_plan)
    plan_s = time.process_time() - start_s
    start_s = time.process_time()
    new_locations = _move_last_engine(locations, tensor)
    _serialize(
        planner.plan(
            sides.trainer_layouts,
            sides.engine_layouts[-1:],
            [*new_locations[: sizes.num_ranks], *new_locations[-tensor:]],
        )
    )
    _serialize(planner.plan(sides.trainer_layouts, sides.engine_layouts, new_locations))
    replace_s = time.process_time() - start_s
    is_limited = len(locations) <= MAX_RANKS_WITH_LIMITS
    return _describe(case, sides, link_plan, locations, args) | {
        "setup_s": round(sides.trace_s + plan_s, 3),
        "setup_limit_s": SETUP_LIMIT_S if is_limited else None,
        "trace_s": round(sides.trace_s, 3),
        "replace_s": round(replace_s, 3),
        "replace_limit_s": REPLACE_LIMIT_S if is_limited else None,
        "groups_max": _count_groups(case),
        "control_mib": round(control_bytes / 2**20, 2),
        "control_limit_mib": CONTROL_LIMIT_MIB if is_limited else None,
    }


def _describe(
    case: Case,
    sides: Sides,
    link_plan: LinkPlan,
    locations: Sequence[RankLocation],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the figures of a plan."""
    plan, item_bytes = link_plan.plan, DTYPE_BYTES[args.dtype]
    traffic = count_traffic(plan, locations, args.speeds)
    layouts = [layout for engine in sides.engine_layouts for layout in engine]
    own_bytes = {
        id(layout): item_bytes * sum(_num_elements(shard) for shard in layout)
        for layout in distinct_layouts(layouts)
    }
    ratios = [
        traffic.received_bytes_of(rank) / own_bytes[id(layout)]
        for rank, layout in zip(plan.rollout_ranks, layouts, strict=True)
    ]
    open_bytes, largest, copies = 0, 0, (0, 0)
    for layout in distinct_layouts(sides.engine_layouts[0]):
        rank = plan.num_trainer_ranks + layouts.index(layout)
        open_bytes = max(open_bytes, max_open_bytes(link_plan.engine_plans[0], rank, layout))
        modules = module_bytes(layout, item_bytes)
        largest = max(largest, *modules.values())
        copies = max(copies, _count_copies(link_plan.engine_plans[0], rank, layout))
    slots = 2 * max(bucket.num_bytes for bucket in plan.buckets)
    pairs = {frozenset(hop) for bucket in plan.buckets for hop in bucket.hops}
    num_peers = Counter(rank for pair in pairs for rank in pair)
    return {
        "bench": "simulate_reshard",
        "case": case.name,
        "model": case.model,
        "trainer_ranks": plan.num_trainer_ranks,
        "rollout_ranks": plan.num_rollout_ranks,
        "open_gib": round((open_bytes + slots) / GIB, 3),
        "open_limit_gib": round((2 * largest + slots) / GIB, 3),
        "peers_max": traffic.max_peers(),
        "peers_limit": PEERS_LIMIT,
        "copies_max": copies[0],
        "copy_calls_max": copies[1],
        "predicted_s": round(traffic.predicted_s, 4),
        "floor_s": round(max(own_bytes.values()) / args.speeds.network, 4),
        "received_ratio": max(ratios, key=lambda ratio: abs(ratio - 1.0)),
        "network_gib": round(traffic.total_bytes(LinkType.network) / GIB, 2),
        "min_network_gib": round(traffic.min_network_bytes / GIB, 2),
        "connections": len(pairs) + plan.world_size,
        "connections_max": max(num_peers.values()) + 1,
        "connections_limit": 2 * PEERS_LIMIT + 1,
        "store_requests": count_store_requests(plan.world_size, len(pairs)),
        "published": case.published,
        "buckets": len(plan.buckets),
    }


def count_store_requests(num_ranks: int, num_pairs: int) -> int:
    """Return the requests to the store in a join.

    A rank sets that it has joined and its address, arrives at the barrier and waits there; the last
    one opens it. Then it waits for the address of each peer and gets it.
    """
    return 4 * num_ranks + 1 + 2 * 2 * num_pairs


def _count_copies(plan: TransferPlan, rank: int, layout: Layout) -> tuple[int, int]:
    """Return how many slices a rollout rank copies in an update, and with how many calls."""
    codec = FrameCodec(plan, layout)
    batches = [codec.batch(bucket) for bucket, hop in plan.hops_of(rank) if hop.target == rank]
    calls = sum(len(batch.split_by_module()) for batch in batches)
    return sum(len(batch.parts) for batch in batches), calls


def broken_bounds(line: dict[str, Any]) -> list[str]:
    """Return a message for every limit that a case exceeds."""
    limits = {
        "open_gib": line["open_limit_gib"],
        "peers_max": line["peers_limit"],
        "setup_s": line["setup_limit_s"],
        "replace_s": line["replace_limit_s"],
        "network_gib": line["min_network_gib"],
        "received_ratio": 1.0,
        "connections_max": line["connections_limit"],
        "groups_max": GROUPS_LIMIT,
        "control_mib": line["control_limit_mib"],
    }
    return [
        f"{key}={line[key]}, expected at most {limit}"
        for key, limit in limits.items()
        if limit is not None and line[key] > limit
    ]


def _make_sides(case: Case, sizes: TrainerParallelSizes, dtype: str) -> Sides:
    path = Path(case.model)
    path = path if path.is_file() else CONFIGS / f"{case.model}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise ValueError(f"--model {case.model}: expected a config.json or one of {names}")
    tensor = case.rollout["tensor"]
    shape, sample, sample_s = _trace(path, tensor, dtype)
    trace_s = sample_s / tensor * shape.num_layers / len(first_layer_of_each_type(shape))
    engine = [expand_layout(shape, layout) for layout in sample]
    return Sides(shape, trainer_layouts(shape, sizes), [engine] * case.rollout["engines"], trace_s)


def _trace(
    path: Path, tensor_size: int, dtype: str
) -> tuple[ModelShape, list[list[ShardLayout]], float]:
    """Return the model's shape, an engine's layouts of one layer of each type, and CPU seconds."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from mega_agentrl.generator.weights.loader_trace import trace_engine_layouts

    config = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        shape = ModelShape.from_folder(folder)
        file.write_text(json.dumps(sample_config(config, shape)), encoding="utf-8")
        trace_engine_layouts(folder, tensor_size, dtype)  # imports the model's modules
        start_s = time.process_time()
        engine = trace_engine_layouts(folder, tensor_size, dtype)
    return shape, engine, time.process_time() - start_s


def sample_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the config of the model with one layer of each type."""
    layers = first_layer_of_each_type(shape)
    changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
    if shape.moe:
        dense = [index for index, layer in enumerate(layers) if not shape.is_moe_layer(layer)]
        changes |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if "text_config" in config:
        decoder = _without_layer_types(config["text_config"])
        return config | {"text_config": decoder | changes}
    return _without_layer_types(config) | changes


def _without_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "layer_types"}


_LAYER_NAME = re.compile(r"\blayers\.(\d+)\.")


def expand_layout(shape: ModelShape, sample: Sequence[ShardLayout]) -> Layout:
    """Return a worker's shards of the whole model from its shards of one layer of each type."""
    first_layers = first_layer_of_each_type(shape)
    layout = []
    for shard in sample:
        match = _LAYER_NAME.search(shard.name)
        if match is None:
            layout.append(shard)
            continue
        is_moe = shape.is_moe_layer(first_layers[int(match[1])])
        for layer in range(shape.num_layers):
            if shape.is_moe_layer(layer) is is_moe:
                layout.append(_rename_layer(shard, f"layers.{layer}."))
    return layout


def _rename_layer(shard: ShardLayout, prefix: str) -> ShardLayout:
    blocks = tuple(
        Block(_LAYER_NAME.sub(prefix, block.hf_name, count=1), block.hf_rect, block.local_rect)
        for block in shard.blocks
    )
    return ShardLayout(_LAYER_NAME.sub(prefix, shard.name, count=1), shard.shape, blocks)


def trainer_layouts(shape: ModelShape, sizes: TrainerParallelSizes) -> list[Layout]:
    """Return the shards of all trainer ranks; ranks with equal shards share an object."""
    distinct: dict[tuple[int, int, int], Layout] = {}
    layouts = []
    for rank in range(sizes.num_ranks):
        stage, local = divmod(rank, sizes.ranks_per_stage)
        key = (local % sizes.tensor_size, stage, local % sizes.expert_size)
        if key not in distinct:
            distinct[key] = megatron_layout(
                shape,
                ModelParallelRank(
                    tensor_rank=key[0],
                    tensor_size=sizes.tensor_size,
                    pipeline_rank=stage,
                    pipeline_size=sizes.pipeline_size,
                    expert_rank=key[2],
                    expert_size=sizes.expert_size,
                ),
            )
        layouts.append(distinct[key])
    return layouts


def _serialize(link_plan: LinkPlan) -> int:
    """Serialize all distinct parts of the plan, as the driver does; return their bytes."""
    parts = [*link_plan.trainer_plans, *link_plan.engine_plans]
    return sum(len(pickle.dumps(part)) for part in {id(part): part for part in parts}.values())


def _count_groups(case: Case) -> int:
    """Return the number of process groups that the first trainer rank creates, of all kinds."""
    from mega_agentrl.actor.parallel.process_groups import own_group_ranks

    parallel = ParallelConfig(
        **({"sequence_parallel": case.trainer.get("tensor", 1) > 1} | case.trainer)
    )
    return 1 + sum(len(ranks) > 1 for ranks in own_group_ranks(parallel, 0).values())


def _move_last_engine(locations: Sequence[RankLocation], tensor: int) -> list[RankLocation]:
    """Return the locations after the last engine was started again on other machines."""
    first = max(location.node for location in locations) + 1
    nodes = sorted({location.node for location in locations[-tensor:]})
    return [
        *locations[:-tensor],
        *(
            RankLocation(first + nodes.index(location.node), location.device)
            for location in locations[-tensor:]
        ),
    ]


def _num_elements(shard: ShardLayout) -> int:
    return sum(block.hf_rect.numel for block in shard.blocks)


def num_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of a model."""
    return sum(map(prod, hf_shapes(shape).values()))


def _parse_sizes(text: str) -> dict[str, int]:
    """Parse `tensor=8,data=2`."""
    return {key: int(value) for key, value in (item.split("=") for item in text.split(","))}


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    built_in = {case.name: case for case in CASES}
    if args.model:
        sizes = {"tensor": 1, "engines": 1} | args.rollout
        yield Case(
            args.model, args.model, args.trainer, sizes,
            bucket_mib=args.bucket_mib, colocated=args.colocated,
        )  # fmt: skip
        return
    chosen = args.case or (QUICK_CASES if args.quick else [*built_in, *RECIPES])
    for name in chosen:
        if name not in built_in and name not in RECIPES:
            raise ValueError(f"--case {name}: expected one of {', '.join([*built_in, *RECIPES])}")
        yield built_in[name] if name in built_in else recipe_case(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", help="only this case or recipe; repeatable")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_CASES)}")
    parser.add_argument("--model", help="name in tools/model_configs, or a config.json")
    parser.add_argument(
        "--trainer", type=_parse_sizes, default={}, help="tensor=,pipeline=,data=,expert="
    )
    parser.add_argument("--rollout", type=_parse_sizes, default={}, help="tensor=,engines=")
    parser.add_argument("--colocated", action="store_true", help="engines use the trainer's GPUs")
    parser.add_argument("--bucket-mib", type=int, default=64, help="bucket size in MiB")
    parser.add_argument("--per-node", type=int, default=8, help="ranks per machine")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    for link in LinkType:
        default = getattr(LinkSpeeds(), link) / 1e9
        flag = f"--{link.replace('_', '-')}-gbs"
        parser.add_argument(flag, type=float, default=default, help="GB/s per rank and direction")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the cases; return 1 for broken bounds and 2 for sizes that do not fit."""
    args = _parser().parse_args(arguments)
    gc.disable()  # planning creates millions of small objects without cycles
    code = 0
    try:
        speeds = {str(link): getattr(args, f"{link}_gbs") * 1e9 for link in LinkType}
        args.speeds = LinkSpeeds(**speeds)
        for case in _cases(args):
            line = simulate(case, args)
            print(json.dumps(line), flush=True)
            for problem in broken_bounds(line):
                print(f"{case.name}: {problem}", file=sys.stderr)
                code = 1
            gc.collect()
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    return code


if __name__ == "__main__":
    sys.exit(main())
