"""Benchmarks router replay: what recorded experts cost in bytes and in seconds.

    python tools/bench_replay.py [--quick] [--cases PATTERN ...] [--repeats N] [--requests N]
        [--tokens N] [--layers N] [--hidden N] [--experts N] [--top-k N] [--intermediate N]

Ours is a run that replays the engine's routes (`model.router_replay=sampled`), the baseline the
same without (`off`), so that 1 / ratio is what a part costs more:

    rollout/seconds   s; `--requests` prompts of 32 tokens with `--tokens` sampled ones each, from
                      one engine that returns the routes of all tokens and one that does not
    rollout/bytes     bytes; the answers, pickled as Ray sends them
    batch/bytes       bytes; what the driver sends a policy rank for log-prob pass and update
    logp/seconds      s; the log-prob pass
    update/seconds    s; the update, whose digests of routes are checked

Lines of bytes also have `bytes_per_token`, the difference per token, and `routes_per_token`, the
layers times the experts of a token. The model is a random Qwen3-MoE, in float32 on a CPU. Sides
alternate, and take the median of `--repeats`. Rows are flat: the routes of a tree are those of its
tokens, each of which it has once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.config.enums import Dtype  # noqa: E402
from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.config.sections.policy import ModelConfig  # noqa: E402
from mega_agentrl.config.sections.runtime import EngineConfig  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from mega_agentrl.types.batch import TrainBatch  # noqa: E402
from mega_agentrl.types.records import GenerateRequest, Generation  # noqa: E402
from mega_agentrl.types.routes import TokenRoutes  # noqa: E402
from tools.bench_tree import RowShape, TreeShape, make_batch  # noqa: E402
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402
from tools.one_rank import make_shards, start_policy  # noqa: E402

CASES = (
    "rollout/seconds",
    "rollout/bytes",
    "batch/bytes",
    "logp/seconds",
    "update/seconds",
)
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """A measurement with and without routes."""

    replayed: float
    plain: float


def write_model(args: argparse.Namespace, folder: str) -> None:
    """Write a random mixture-of-experts model as a Hugging Face folder."""
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        intermediate_size=args.intermediate,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        vocab_size=2048,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_requests(args: argparse.Namespace) -> list[GenerateRequest]:
    """Return the requests of one round."""
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            request_id=f"{number}",
            token_ids=tuple(rng.integers(5, 2000, PROMPT_TOKENS).tolist()),
            max_tokens=args.tokens,
            seed=number,
            routes_start=0,
        )
        for number in range(args.requests)
    ]


async def measure_rollout(args: argparse.Namespace, folder: str) -> tuple[Sides, Sides, list[int]]:
    """Return the seconds and bytes of a round of both engines, and the tokens of the answers."""
    from mega_agentrl.generator.engine import Engine
    from mega_agentrl.generator.environment import set_vllm_environment

    config = EngineConfig(max_model_len=PROMPT_TOKENS + args.tokens, cpu_kv_cache_gib=1)
    set_vllm_environment(config, log_path=Path(folder) / "vllm.log")
    engines = [
        await Engine().start(config, folder, seed=0, load_weights=True, return_routes=has_routes)
        for has_routes in (True, False)
    ]
    times: list[list[float]] = [[], []]
    answers: list[list[Generation]] = [[], []]
    try:
        for round_number in range(args.repeats + 1):
            for side, engine in enumerate(engines):
                start_s = time.perf_counter()
                answers[side] = await asyncio.gather(
                    *(engine.generate(request) for request in make_requests(args))
                )
                if round_number:  # the first round warms up
                    times[side].append(time.perf_counter() - start_s)
    finally:
        for engine in engines:
            await engine.close()
    for one, other in zip(*answers, strict=True):
        if one.routes is None or other.routes is not None:
            raise RuntimeError("expected routes from the first engine alone")
    num_tokens = [PROMPT_TOKENS + len(answer.token_ids) for answer in answers[0]]
    seconds, num_bytes = (
        Sides(replayed=values[0], plain=values[1])
        for values in (
            [statistics.median(side) for side in times],
            [float(sum(len(pickle.dumps(one)) for one in side)) for side in answers],
        )
    )
    return seconds, num_bytes, num_tokens


class ActorBench:
    """A policy on one rank, and a batch with and without routes."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.repeats = args.repeats
        shape = ModelShape.from_folder(folder)
        self.config = TrainConfig(model=ModelConfig(path=folder, dtype=Dtype.float32))
        self.policy = start_policy(self.config)
        row = RowShape(spans=((args.tokens, True),))
        trees = [TreeShape(prompt_length=PROMPT_TOKENS, rows=(row,))] * args.requests
        plain = make_batch(trees, shape.vocab_size)
        self.num_tokens = sum(map(len, plain.prompt_ids)) + int(plain.length_B.sum())
        self.shards = {
            "plain": make_shards(self.config, plain, share=False),
            "replayed": make_shards(self.config, with_random_routes(plain, args), share=False),
        }

    def measure_bytes(self) -> Sides:
        """Return the size of what the rank is sent."""
        return Sides(**{side: float(len(pickle.dumps(s))) for side, s in self.shards.items()})

    def measure_seconds(self, kind: str) -> Sides:
        """Return the median seconds of a pass."""
        times: dict[str, list[float]] = {side: [] for side in self.shards}
        for round_number in range(self.repeats + 1):
            for side, (scored, update) in self.shards.items():
                start_s = time.perf_counter()
                if kind == "logp":
                    self.policy.compute_log_probs(scored)
                else:
                    stats = self.policy.update(update, scored, lr=0.0)
                    if ("routes_replayed" in stats.metrics) != (side == "replayed"):
                        raise RuntimeError(f"{side}: got metrics {sorted(stats.metrics)}")
                if round_number:
                    times[side].append(time.perf_counter() - start_s)
        return Sides(**{side: statistics.median(values) for side, values in times.items()})


def with_random_routes(batch: TrainBatch, args: argparse.Namespace) -> TrainBatch:
    """Return the batch with a route of distinct random experts for each token."""
    rng = np.random.default_rng(1)
    routes = []
    for prompt, response_T, length in zip(
        batch.prompt_ids, batch.response_BT.tolist(), batch.length_B.tolist(), strict=True
    ):
        token_ids = [*prompt, *response_T[:length]]
        scores = rng.random((len(token_ids), args.layers, args.experts))
        expert_NLK = np.argsort(scores, axis=-1)[..., : args.top_k]
        routes.append(TokenRoutes.from_experts(expert_NLK, token_ids, args.experts))
    return batch.with_fields(routes_B=routes)


def measure(
    chosen: Sequence[str], args: argparse.Namespace, folder: str
) -> Iterator[dict[str, object]]:
    """Yield the lines of the chosen cases."""

    def line(case: str, sides: Sides, num_tokens: int) -> dict[str, object]:
        kind = "bytes" if case.endswith("bytes") else "s"
        found = bench_line("replay", case, kind, sides.replayed, sides.plain)
        if kind == "bytes":
            found["bytes_per_token"] = round((sides.replayed - sides.plain) / num_tokens, 2)
            found["routes_per_token"] = args.layers * args.top_k
        return found

    if any(case.startswith("rollout") for case in chosen):
        seconds, num_bytes, num_tokens = asyncio.run(measure_rollout(args, folder))
        for case, sides in (("rollout/seconds", seconds), ("rollout/bytes", num_bytes)):
            if case in chosen:
                yield line(case, sides, sum(num_tokens))
    measurements: dict[str, Callable[[ActorBench], Sides]] = {
        "batch/bytes": ActorBench.measure_bytes,
        "logp/seconds": lambda bench: bench.measure_seconds("logp"),
        "update/seconds": lambda bench: bench.measure_seconds("update"),
    }
    if cases := [case for case in measurements if case in chosen]:
        bench = ActorBench(args, folder)
        for case in cases:
            yield line(case, measurements[case](bench), bench.num_tokens)
        bench.policy.close()


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=["*"], help="shell patterns")
    for name, default in (
        ("repeats", 5),
        ("requests", 64),
        ("tokens", 96),
        ("layers", 4),
        ("hidden", 256),
        ("experts", 32),
        ("top-k", 4),
        ("intermediate", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parse_options(parser, arguments, repeats=1, requests=4, tokens=8)
    try:
        chosen = select_cases(args.cases, CASES)
    except ValueError as error:
        print(f"bench_replay: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_model(args, folder)
        for found in measure(chosen, args, folder):
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    # At a normal exit of the interpreter vLLM aborts if its engine is still shutting down.
    sys.stdout.flush()
    os._exit(code)
