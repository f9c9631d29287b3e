"""Benchmarks training steps of the actor on one device against transformers, a JSON line a case.

    python tools/bench_actor.py [--quick] [--tokens N] [--row N] [--layers N] [--hidden N]
        [--heads N] [--kv-heads N] [--intermediate N] [--vocab N] [--repeats N]

The model is a random Qwen2, by default four layers as wide as those of Qwen2.5-7B. A step is
forward, backward and optimizer on `--tokens` tokens in full rows of `--row` tokens, in bfloat16.

    ours       `actor.policy.PolicyRank.sft_step` on one rank: the rows packed into one flat row,
               the vocabulary head without full logits, float32 gradients and master weights
    baseline   transformers' model on the rows as a batch, torch's scaled-dot-product attention,
               the model's own cross entropy, torch's fused AdamW, all of it in bfloat16

Cases are `step` (s), `tokens` (tokens/s), `mfu` (model FLOPs over the GPU's peak, as
`estimate.flops` counts both; null on other devices) and `memory` (GiB that torch's allocator has
given out at most; null on CPUs). A line has the keys bench, case, unit, ours, baseline and
ratio = baseline / ours. Both sides start with the same weights, and the losses of their first steps
must agree. Needs only torch, transformers, megatron-core and what they bring.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.batch.packed_rows import PackedRows  # noqa: E402
from mega_agentrl.batch.row_sharding import RowSharder  # noqa: E402
from mega_agentrl.config.enums import Dtype  # noqa: E402
from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.config.sections.policy import ModelConfig  # noqa: E402
from mega_agentrl.data.sft_dataset import Demonstration, collate_demonstrations  # noqa: E402
from mega_agentrl.estimate.flops import peak_flops, train_flops  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from tools.measurement import bench_line, parse_options  # noqa: E402

LEARNING_RATE = 1e-5
NUM_WARM_UP_STEPS = 2
LOSS_TOLERANCE = 0.02
"""Largest relative difference of the first steps' losses, which bfloat16 explains."""
GIB = 1 << 30


@dataclass(frozen=True)
class StepCost:
    """Loss, time and memory of the steps of one side."""

    first_loss: float
    step_s: float
    """Median seconds of a step."""
    peak_bytes: int | None
    """Most bytes of GPU memory in use; None on a CPU."""


def build_baseline(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """Return transformers' model with random weights in bfloat16."""
    config = transformers.Qwen2Config(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        intermediate_size=args.intermediate,
        vocab_size=args.vocab,
        max_position_embeddings=max(args.row, 32),
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )


def measure_baseline(
    model: torch.nn.Module, token_RT: torch.Tensor, device: torch.device, repeats: int
) -> StepCost:
    """Measure steps of transformers' model on `[rows, tokens]` token ids."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    token_RT = token_RT.to(device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=token_RT, labels=token_RT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return measure_steps(step, device, repeats)


def measure_ours(
    folder: Path, token_RT: torch.Tensor, device: torch.device, repeats: int
) -> StepCost:
    """Measure steps of a policy rank with the weights of a folder on the same token ids."""
    from tools.one_rank import start_policy

    config = TrainConfig(model=ModelConfig(path=str(folder), dtype=Dtype.bfloat16))
    config.optim.micro_batch_tokens = token_RT.numel()
    policy = start_policy(config)
    # Every token but the first of a row is trained on.
    batch = collate_demonstrations(
        [
            Demonstration((first,), tuple(rest), (1,) * len(rest))
            for first, *rest in token_RT.tolist()
        ]
    )
    (shard,) = RowSharder.from_config(config).update_shards(
        batch, [batch.mask_BT], rows=PackedRows.from_batch(batch), aggregation="token_mean"
    )
    measured = measure_steps(lambda: policy.sft_step(shard, LEARNING_RATE).loss, device, repeats)
    policy.close()
    return measured


def measure_steps(step: Callable[[], float], device: torch.device, repeats: int) -> StepCost:
    """Take steps, which return their losses, and time those after the first."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for _ in range(NUM_WARM_UP_STEPS + repeats):
        if on_gpu:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return StepCost(
        first_loss=losses[0],
        step_s=statistics.median(times[NUM_WARM_UP_STEPS:]),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def benchmark(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure both sides and return the lines.

    Raises:
        RuntimeError: The losses of the first steps differ.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)
    num_rows = args.tokens // args.row
    token_RT = torch.randint(0, args.vocab, (num_rows, args.row), generator=generator)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_baseline(args, device)
        model.save_pretrained(folder)
        baseline = measure_baseline(model, token_RT, device, args.repeats)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        ours = measure_ours(folder, token_RT, device, args.repeats)
        shape = ModelShape.from_folder(folder)
    if abs(ours.first_loss - baseline.first_loss) > LOSS_TOLERANCE * baseline.first_loss:
        raise RuntimeError(f"first loss {ours.first_loss}, expected {baseline.first_loss}")
    gpu_name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = peak_flops(gpu_name)
    flops = train_flops(shape, [args.row] * num_rows, num_rows * (args.row - 1))
    suffix = f"L{args.layers}/H{args.hidden}/T{num_rows * args.row}"
    sides = (ours, baseline)

    def line(kind: str, unit: str, value: Callable[[StepCost], float | None]) -> dict[str, object]:
        return bench_line("actor", f"{kind}/{suffix}", unit, *map(value, sides))

    return [
        line("step", "s", lambda side: side.step_s),
        line("tokens", "tokens/s", lambda side: token_RT.numel() / side.step_s),
        line("mfu", "share", lambda side: flops / side.step_s / peak if peak else None),
        line("memory", "GiB", lambda side: side.peak_bytes / GIB if side.peak_bytes else None),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sizes = {
        "tokens": 16_384, "row": 4096, "layers": 4, "hidden": 3584, "heads": 28, "kv-heads": 4,
        "intermediate": 18_944, "vocab": 152_064, "repeats": 5,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    args = parse_options(
        parser,
        arguments,
        tokens=64,
        row=16,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        intermediate=96,
        vocab=128,
        repeats=1,
    )
    if args.tokens % args.row:
        print(f"error: --tokens {args.tokens}: expected a multiple of --row {args.row}",
              file=sys.stderr)  # fmt: skip
        return 2
    for line in benchmark(args):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
