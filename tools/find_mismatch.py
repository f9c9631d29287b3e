"""Finds the first place in a model where engine and policy compute something else.

    python tools/find_mismatch.py FOLDER [--engine-model FOLDER] [--tokens N] [--seed K]
                                  [--top K] [key=value ...]

Both load the Hugging Face folder, without training or a weight transfer, and compute the log-probs
of the same random prompt. The values after each norm, rotary embedding, attention, router and MLP
are compared, each computed from the engine's values just before it, so that a difference is seen
where it arises, at any depth. Prints the largest error of each kind of value with the layer, and
the first one that rounding does not explain, with its probable cause.

`--engine-model` gives the engine another folder, such as a checkpoint that should be equal.
`key=value` are settings of a run, such as `model.dtype=bfloat16`; both sides run on one device,
a GPU if there is one.

Exit codes: 0 nothing differs, 1 something does, 2 bad input.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.config.errors import ConfigError  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from mega_agentrl.reshard.verify.layer_mismatch import (  # noqa: E402
    PointError,
    compare_points,
    describe_difference,
    first_difference,
    largest_by_kind,
)
from tools.preflight_parts.compose import compose_config  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mega_agentrl.config.schema import TrainConfig

DIFFERS, BAD_INPUT = 1, 2
ENGINE_DEADLINE_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare both sides and print where they differ."""
    args = _parse(arguments)
    try:
        config = _make_config(args)
        shape = ModelShape.from_folder(config.model.path)
        ModelShape.from_folder(args.engine_model or config.model.path)
        tokens = _random_prompt(args, shape)
    except (ValueError, OSError) as error:
        print(f"find_mismatch: {error}", file=sys.stderr)
        return BAD_INPUT
    engine = probe_engine(config, str(args.engine_model or config.model.path), tokens)
    policy = probe_policy(config, tokens, engine)
    try:
        errors = compare_points(engine, policy, _dtype(config))
    except ValueError as error:
        print(f"find_mismatch: {error}", file=sys.stderr)
        return BAD_INPUT
    found = first_difference(errors)
    _print_table(largest_by_kind(errors))
    print(describe_difference(found))
    return 0 if found is None else DIFFERS


def probe_engine(config: TrainConfig, folder: str, tokens: list[int]) -> dict[str, np.ndarray]:
    """Return the values of a new engine, which runs in a process of its own and then ends."""
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_serve_engine, args=(child_end, config, folder, tokens))
    process.start()
    child_end.close()
    try:
        if not pipe.poll(ENGINE_DEADLINE_S):
            raise RuntimeError(f"the engine did not answer within {ENGINE_DEADLINE_S:g} s")
        values: dict[str, np.ndarray] = pipe.recv()
    except EOFError:
        raise RuntimeError("the engine did not start; its messages are above") from None
    else:
        process.join(30)
        return values
    finally:
        if process.is_alive():
            process.kill()


def probe_policy(
    config: TrainConfig, tokens: list[int], engine: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the values of a policy on one rank, computed from the engine's."""
    from mega_agentrl.actor.megatron_model import RankInfo
    from mega_agentrl.actor.model.layer_probe import probe_chunk
    from mega_agentrl.actor.policy import PolicyRank
    from mega_agentrl.runtime.free_port import free_port

    rank = RankInfo(
        rank=0, world_size=1, master_address="127.0.0.1", master_port=free_port(), timeout_s=60.0
    )
    policy = PolicyRank(config, rank)
    try:
        policy.load_hf(config.model.path)
        (chunk,) = policy.megatron_model.chunks
        with probe_chunk(chunk.module, engine) as values:
            log_probs = policy.compute_prompt_log_probs(tokens)
        return values | {"log_probs": np.array(log_probs)}
    finally:
        policy.close()


def _serve_engine(pipe: Connection, config: TrainConfig, folder: str, tokens: list[int]) -> None:
    import torch

    from mega_agentrl.generator.environment import set_vllm_environment

    log_path = Path(tempfile.mkdtemp(prefix="find_mismatch-")) / "engine.log"
    set_vllm_environment(
        config.engine,
        on_gpu=torch.cuda.is_available(),
        log_path=log_path,
        exact_model=folder if config.model.zero_mismatch else "",
    )
    pipe.send(asyncio.run(_run_engine(config, folder, tokens)))


async def _run_engine(config: TrainConfig, folder: str, tokens: list[int]) -> dict[str, Any]:
    from mega_agentrl.generator.engine import Engine

    engine = await Engine().start(
        config.engine,
        folder,
        seed=config.seed,
        dtype=config.model.dtype,
        load_weights=True,
        return_routes=True,
    )
    try:
        return await engine.probe_layers(tokens)
    finally:
        await engine.close()


def _make_config(args: argparse.Namespace) -> TrainConfig:
    """Return the configuration of a run that only evaluates, on one rank and one engine."""
    config = compose_config(args.overrides, model_path=str(args.folder))
    config.total_steps, config.total_epochs, config.sft.max_steps = 0, 0, 0
    config.engine.tensor_parallel_size, config.engine.enforce_eager = 1, True
    config.engine.max_model_len = args.tokens + 1
    config.optim.micro_batch_tokens = max(config.optim.micro_batch_tokens, args.tokens)
    return config


def _random_prompt(args: argparse.Namespace, shape: ModelShape) -> list[int]:
    if not 2 <= args.tokens < shape.max_position_embeddings:
        raise ConfigError(
            "--tokens",
            args.tokens,
            f"2 to {shape.max_position_embeddings - 1}",
            "a prompt that is longer than the model's context",
        )
    generator = np.random.default_rng(args.seed)
    tokens: list[int] = generator.integers(0, shape.vocab_size, args.tokens).tolist()
    return tokens


def _dtype(config: TrainConfig) -> str:
    import torch

    return str(config.model.dtype.resolve(on_gpu=torch.cuda.is_available()))


def _print_table(errors: Sequence[PointError]) -> None:
    print(f"{'largest error of':<24} {'error':>10} {'limit':>10}")
    for error in errors:
        mark = "  <- differs" if error.differs else ""
        print(f"{error.point:<24} {error.error:>10.2g} {error.limit:>10.2g}{mark}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of the model")
    parser.add_argument("--engine-model", type=Path, help="another folder for the engine")
    parser.add_argument("--tokens", type=int, default=64, help="length of the prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of a run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.captureWarnings(True)  # of libraries about packages that are missing
    sys.exit(main())
