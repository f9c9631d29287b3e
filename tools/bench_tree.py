"""Benchmarks the policy on rollout trees packed into one batch, one JSON line per case.

    python tools/bench_tree.py [--quick] [--cases PATTERN ...] [--repeats N] [--cpu-time]
        [--layers N] [--hidden N] [--heads N] [--kv-heads N] [--head-dim N] [--intermediate N]
        [--vocab N]

A case is ``update`` (s; packing, forward and backward pass, optimizer step), ``logp`` (s; packing
and forward pass, all response tokens) or ``memory`` (MiB, the peak of an update) / a batch of trees
/ what ours is compared with. All sides run on one rank of `actor.policy.PolicyRank`:

    ours     trees, each token computed once (`batch.trees=true`)
    flat     every trajectory as a row of its own (`batch.trees=false`)
    dense    the same trees, but one S x S boolean mask over the packed tokens in torch's
             scaled-dot-product attention, which is how AReaL trains on trees with Megatron
    gather   on a GPU: the same trees with keys gathered along each path, in torch's
             variable-length attention (`model.tree_attention=gather`)

Batches:

    group      a group of 16 on a prompt of 2,048 tokens, with answers of 512
    arpo       trees as the smoke run makes them: 16 prompts of 20 to 32 tokens, 8 trajectories each
               from 4 roots, which fork after a tool result with probability 1/2
    chain20    an agent's trajectory of 30 turns on a prompt of 512 tokens (64 sampled tokens and a
               result of 64 each) and 19 siblings that leave it after one of its turns, take one
               more turn and answer with 64 tokens

`optim.micro_batch_tokens` is the same for all sides and holds the largest tree, so that flat rows
need more micro-batches. A line has the keys bench, case, unit, ours, baseline and
ratio = baseline / ours. Lines of times also have

    tokens_ratio             input tokens of the baseline / of ours
    share_of_tokens_ratio    ratio / tokens_ratio; the bound against flat rows is 0.9
    flops_ratio              the same ratio of model FLOPs (`estimate.flops`): attention and the
                             output layer do not shrink like the tokens

The model is a random Qwen3 in float32, on a GPU in bfloat16. By default it has two narrow layers,
so that a run takes about 5 minutes on two cores, with the proportions of Qwen3-4B: the output layer
has a tenth of the layers' weights, hence the small vocabulary, and 11,000 attention scores cost as
much as the rest of the model for a token (Qwen3-4B: 13,600). A GPU takes larger layers: `--layers 8
--hidden 2560 --heads 32 --kv-heads 8 --head-dim 128 --intermediate 9728 --vocab 30720`. Sides
alternate in one process, which takes the median of `--repeats`, at a learning rate of 0; losses,
gradient norms and log-probs must agree. With `--cpu-time` a time is the CPU seconds of one thread,
for a machine with other work. Memory is measured in a process for each side, beyond what was
resident after a small update; on a GPU it is the allocator's peak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import transformers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.actor.model.packed_attention import (  # noqa: E402
    PackedAttention,
    PackedTreeParams,
)
from mega_agentrl.batch.packed_rows import unpack_scores  # noqa: E402
from mega_agentrl.batch.row_sharding import (  # noqa: E402
    ScoringShard,
    UpdateShard,
)
from mega_agentrl.batch.tree_order import order_rows, row_lengths  # noqa: E402
from mega_agentrl.config.enums import Dtype, TreeAttention  # noqa: E402
from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.config.sections.policy import ModelConfig  # noqa: E402
from mega_agentrl.estimate.device import MIB  # noqa: E402
from mega_agentrl.estimate.flops import train_flops  # noqa: E402
from mega_agentrl.estimate.host_memory import PROCESS_MEMORY  # noqa: E402
from mega_agentrl.reshard.layout import round_up  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from mega_agentrl.types.batch import TrainBatch  # noqa: E402
from tools.measurement import PeakMemory, bench_line, parse_options, select_cases  # noqa: E402
from tools.one_rank import make_shards, start_policy  # noqa: E402

SIDES = ("flat", "ours", "dense", *(("gather",) if torch.cuda.is_available() else ()))
KINDS = ("update", "logp", "memory")
DEADLINE_S = 3600.0
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of log-probs, and relative difference of losses and gradient norms."""


# ---- batches of trees ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """A trajectory of a tree."""

    spans: tuple[tuple[int, bool], ...]
    """Number of tokens of each new span of its response, and whether the policy sampled them."""
    parent: int | None = None
    """The earlier trajectory of the tree from which it is forked."""
    fork_length: int = 0
    """Number of response tokens that it shares with the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The trajectories of a prompt."""

    prompt_length: int
    rows: tuple[RowShape, ...]


def group_trees() -> list[TreeShape]:
    """Return a group without forks."""
    return [TreeShape(prompt_length=2048, rows=(RowShape(spans=((512, True),)),) * 16)]


def chain_trees() -> list[TreeShape]:
    """Return an agent's trajectory with siblings that leave it along the way."""
    answer = (64, True)
    turn = (answer, (64, False))
    chain = RowShape(spans=turn * 29 + (answer,))
    siblings = [
        RowShape(spans=(*turn, answer), parent=0, fork_length=(1 + index * 28 // 18) * 128)
        for index in range(19)
    ]
    return [TreeShape(prompt_length=512, rows=(chain, *siblings))]


def arpo_trees() -> list[TreeShape]:
    """Return the trees of a step of the smoke run, as ARPO's rule grows them."""
    generator = random.Random(0)
    trees = []
    for _ in range(16):
        rows: list[RowShape] = []
        for _ in range(4):
            _grow_trajectory(rows, generator, can_fork=True)
        while len(rows) < 8:
            _grow_trajectory(rows, generator)
        trees.append(TreeShape(prompt_length=generator.randint(20, 32), rows=tuple(rows)))
    return trees


def _grow_trajectory(
    rows: list[RowShape],
    generator: random.Random,
    *,
    can_fork: bool = False,
    parent: int | None = None,
    fork_length: int = 0,
) -> None:
    """Append a trajectory of one or two calls, and its fork if there is one."""
    spans: list[tuple[int, bool]] = []
    length, forks, number = fork_length, [], len(rows)
    for _ in range(generator.choice((1, 1, 2) if parent is None else (0, 1))):
        call, result = generator.randint(10, 18), generator.randint(8, 16)
        spans += [(call, True), (result, False)]
        length += call + result
        if can_fork and not forks and generator.random() < 0.5:
            forks.append(length)
    spans.append((generator.randint(10, 14), True))
    rows.append(RowShape(spans=tuple(spans), parent=parent, fork_length=fork_length))
    for position in forks:
        _grow_trajectory(rows, generator, parent=number, fork_length=position)


BATCHES: dict[str, Callable[[], list[TreeShape]]] = {
    "group": group_trees,
    "arpo": arpo_trees,
    "chain20": chain_trees,
}
CASES = tuple(
    f"{kind}/{name}/{versus}"
    for name in BATCHES
    for kind in KINDS
    for versus in SIDES
    if versus != "ours"
)


def make_batch(trees: Sequence[TreeShape], vocab: int) -> TrainBatch:
    """Return a batch of trees with random tokens, ready for an update."""
    new_ids = count()
    ids: list[list[int]] = []
    sampled: list[list[bool]] = []
    groups, prompt_lengths = [], []
    for group, tree in enumerate(trees):
        first, prompt = len(ids), list(islice(new_ids, tree.prompt_length))
        for row in tree.rows:
            parent = None if row.parent is None else first + row.parent
            shared = prompt if parent is None else ids[parent][: len(prompt) + row.fork_length]
            flags = [] if parent is None else sampled[parent][: row.fork_length]
            num_new = sum(length for length, _ in row.spans)
            ids.append(shared + list(islice(new_ids, num_new)))
            sampled.append(flags + [flag for length, flag in row.spans for _ in range(length)])
            groups.append(group)
            prompt_lengths.append(len(prompt))
    make = torch.Generator().manual_seed(0)
    num_ids = next(new_ids)
    # The padding, -1, is the last element.
    token_I = torch.randint(0, vocab, (num_ids + 1,), generator=make)
    logp_I = 0.1 * torch.randn(num_ids + 1, generator=make) - math.log(vocab)
    rows = list(zip(ids, prompt_lengths, strict=True))
    id_BT = pad_sequence([torch.tensor(row[size:]) for row, size in rows], True, -1)
    shape = id_BT.shape
    order, shared_lengths = order_rows(ids)
    return TrainBatch(
        prompt_ids=tuple(tuple(token_I[row[:size]].tolist()) for row, size in rows),
        response_BT=torch.where(id_BT < 0, 0, token_I[id_BT]),
        length_B=(id_BT >= 0).sum(dim=1),
        mask_BT=pad_sequence([torch.tensor(flags) for flags in sampled], True, False),
        group_B=torch.tensor(groups),
        reward_B=torch.zeros(shape[0]),
        tree_token_BT=id_BT,
        rollout_logp_BT=logp_I[id_BT],
        rollout_entropy_BT=-logp_I[id_BT],
        version_BT=torch.zeros(shape, dtype=torch.int64),
        old_logp_BT=logp_I[id_BT],
        advantage_BT=torch.randn(shape[0], 1, generator=make).expand(shape).clone(),
        tree_order_B=torch.tensor(order),
        shared_length_B=torch.tensor(shared_lengths),
    )


# ---- a dense mask --------------------------------------------------------------------------


@contextmanager
def dense_masks() -> Iterator[None]:
    """Let the model's core attention use a boolean mask, made once for each micro-batch."""
    last: list[Any] = [None, None]

    def forward(
        module: PackedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedTreeParams,
        **__: Any,
    ) -> torch.Tensor:
        if last[0] is not packed_seq_params:
            last[:] = packed_seq_params, make_dense_mask(packed_seq_params, query.device)
        repeats = query.size(2) // key.size(2)
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
        out = functional.scaled_dot_product_attention(
            *(part.permute(1, 2, 0, 3) for part in (query, key, value)),
            attn_mask=last[1],
            scale=module.softmax_scale,
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    with patch.object(PackedAttention, "forward", forward):
        yield


def make_dense_mask(trees: PackedTreeParams, device: torch.device) -> torch.Tensor:
    """Return `[S, S]` bool, True where a token (row) attends to another."""
    size = trees.start_G[-1]
    mask_SS = torch.zeros(size, size, dtype=torch.bool, device=device)
    for branch in trees.branches:
        own = slice(branch.start, branch.stop)
        for start, stop in branch.path:
            mask_SS[own, start:stop] = True
        mask_SS[own, own].fill_(True).tril_()
    return mask_SS


# ---- one process ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Measurements of one process."""

    folder: str
    """Hugging Face folder of the model."""
    batch: str
    """A name in `BATCHES`."""
    kinds: tuple[str, ...]
    """`("memory",)`, or kinds whose time is measured."""
    sides: tuple[str, ...]
    repeats: int
    is_cpu_time: bool
    """Whether to measure CPU seconds of one thread."""


class Bench:
    """A policy on one rank, a batch, and what the rank is sent of it for each side."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            PROCESS_MEMORY.start()
        self.clock = time.process_time if job.is_cpu_time else time.perf_counter
        self.shape = ModelShape.from_folder(job.folder)
        self.batch = make_batch(BATCHES[job.batch](), self.shape.vocab_size)
        dtype = Dtype.bfloat16 if self.device.type == "cuda" else Dtype.float32
        self.config = TrainConfig(model=ModelConfig(path=job.folder, dtype=dtype))
        self.config.optim.micro_batch_tokens = _budget_tokens(self.batch)
        self.policy = start_policy(self.config, num_threads=1 if job.is_cpu_time else None)
        self.shards = {side: self.make_shards(self.batch, side) for side in job.sides}

    def make_shards(self, batch: TrainBatch, side: str) -> tuple[ScoringShard, UpdateShard]:
        """Return what a rank is sent of a batch."""
        return make_shards(self.config, batch, share=side != "flat")

    def run(
        self, kind: str, side: str, shards: tuple[ScoringShard, UpdateShard]
    ) -> tuple[torch.Tensor, ...]:
        """Run an update or a log-prob pass; return what must be equal for all sides."""
        scored, update = shards
        contexts = {"dense": dense_masks, "gather": self.gathered_keys}
        with contexts.get(side, nullcontext)():
            if kind == "logp":
                scores = self.policy.compute_log_probs(scored)
                assert scores is not None, "there is one rank"
                return unpack_scores([scores], *self._padded_size())
            stats = self.policy.update(update, scored, lr=0.0)
            return torch.tensor(stats.loss), torch.tensor(stats.grad_norm)

    @contextmanager
    def gathered_keys(self) -> Iterator[None]:
        """Let the model's core attention gather keys along each path."""
        modules = [
            module
            for chunk in self.policy.megatron_model.chunks
            for module in chunk.modules()
            if isinstance(module, PackedAttention)
        ]
        kernels = [module.tree_attention for module in modules]
        for module in modules:
            module.tree_attention = TreeAttention.gather
        try:
            yield
        finally:
            for module, kernel in zip(modules, kernels, strict=True):
                module.tree_attention = kernel

    def warm_up(self) -> None:
        """Run all sides, so that threads, kernels and Adam's moments exist."""
        small = make_batch(
            [TreeShape(prompt_length=4, rows=(RowShape(spans=((4, True),)),) * 2)], 64
        )
        for side in self.job.sides:
            self.run("update", side, self.make_shards(small, side))
            if self.device.type == "cuda" and self.job.kinds != ("memory",):
                self.run("update", side, self.shards[side])

    def measure_time(self, kind: str) -> dict[str, float]:
        """Return the median seconds of each side, which alternate and must agree."""
        times: dict[str, list[float]] = {side: [] for side in self.job.sides}
        found = {}
        for _ in range(self.job.repeats):
            for side in self.job.sides:
                self._synchronize()
                start_s = self.clock()
                found[side] = self.run(kind, side, self.shards[side])
                self._synchronize()
                times[side].append(self.clock() - start_s)
        tolerance = TOLERANCE[self.policy.megatron_model.dtype]
        for values in found.values():
            torch.testing.assert_close(values, found["ours"], rtol=tolerance, atol=tolerance)
        return {side: statistics.median(values) for side, values in times.items()}

    def measure_memory(self) -> dict[str, float]:
        """Return the peak MiB of the only side's update."""
        (side,) = self.job.sides
        if self.device.type == "cpu":
            memory = PeakMemory()
            self.run("update", side, self.shards[side])
            return {side: memory.peak_mib()}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run("update", side, self.shards[side])
        return {side: (torch.cuda.max_memory_allocated() - before) / MIB}

    def work(self, kind: str) -> dict[str, tuple[int, float]]:
        """Return the input tokens and the model FLOPs of flat rows and of trees."""
        is_scored_BT = self.batch.mask_BT if kind == "update" else self.batch.tree_token_BT >= 0
        scored_M = self.batch.tree_token_BT[is_scored_BT]
        work = {}
        for side, num_scored in (("flat", len(scored_M)), ("ours", len(scored_M.unique()))):
            rows = row_lengths(self.batch, share=side == "ours")
            lengths, shared = rows.input_length_R.tolist(), rows.shared_input_length_R.tolist()
            flops = train_flops(self.shape, lengths, num_scored, shared)
            work[side] = (sum(lengths) - sum(shared), flops)
        return work | {"dense": work["ours"], "gather": work["ours"]}

    def _padded_size(self) -> tuple[torch.Tensor, int]:
        return self.batch.length_B, self.batch.response_BT.size(1)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _budget_tokens(batch: TrainBatch) -> int:
    """Return the tokens of the largest tree, rounded up, and at least those of the smoke run."""
    rows = row_lengths(batch)
    own_R = rows.input_length_R - rows.shared_input_length_R
    tree_R = (rows.shared_length_R == 0).cumsum()
    largest = max(own_R[tree_R == tree].sum() for tree in set(tree_R.tolist()))
    return max(8192, round_up(int(largest), 1024))


def run_job(job: Job) -> NoReturn:
    """Measure, print the result and exit."""
    bench = Bench(job)
    bench.warm_up()
    found: dict[str, Any] = {}
    for kind in job.kinds:
        if kind == "memory":
            found[kind] = {"values": bench.measure_memory()}
        else:
            found[kind] = {"values": bench.measure_time(kind), "work": bench.work(kind)}
    bench.policy.close()
    print(json.dumps(found), flush=True)
    # Threads that torch leaves running can abort the process at interpreter exit.
    os._exit(0)


# ---- all cases -----------------------------------------------------------------------------


def write_model(args: argparse.Namespace, folder: str) -> None:
    """Write a random model as a Hugging Face folder."""
    config = transformers.Qwen3Config(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate,
        vocab_size=args.vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def measure(job: Job) -> dict[str, Any]:
    """Measure in a new process and return the values by kind.

    Raises:
        RuntimeError: The process failed, or the sides do not agree.
    """
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--job"]
    done = subprocess.run(
        [*command, json.dumps(asdict(job))],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{job}: the process ended with {done.returncode}\n{done.stderr}")
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def measure_batch(
    name: str, chosen: Sequence[str], folder: str, args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Yield the lines of the chosen cases of a batch."""
    cases = [case.split("/") for case in chosen if case.split("/")[1] == name]
    versus = {side for _, _, side in cases}
    sides = tuple(side for side in SIDES if side == "ours" or side in versus)
    kinds = {kind for kind, _, _ in cases}
    job = Job(
        folder=folder,
        batch=name,
        kinds=tuple(kind for kind in KINDS if kind in kinds - {"memory"}),
        sides=sides,
        repeats=args.repeats,
        is_cpu_time=args.cpu_time,
    )
    found: dict[str, Any] = measure(job) if job.kinds else {}
    if "memory" in kinds:
        peaks: dict[str, float] = {}
        for side in sides:
            alone = replace(job, kinds=("memory",), sides=(side,))
            peaks |= measure(alone)["memory"]["values"]
        found["memory"] = {"values": peaks}
    for kind, _, side in cases:
        values = found[kind]["values"]
        unit = "MiB" if kind == "memory" else "s"
        line = bench_line("tree", f"{kind}/{name}/{side}", unit, values["ours"], values[side])
        yield line | (ratios(line["ratio"], found[kind]["work"], side) if kind != "memory" else {})


def ratios(ratio: float, work: dict[str, list[float]], side: str) -> dict[str, float]:
    """Return the keys to judge a ratio of times by."""
    tokens, flops = (part / own for part, own in zip(work[side], work["ours"], strict=True))
    return {
        "tokens_ratio": round(tokens, 4),
        "share_of_tokens_ratio": round(ratio / tokens, 4),
        "flops_ratio": round(flops, 4),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    sizes = {
        "repeats": 3, "layers": 2, "hidden": 512, "heads": 2, "kv-heads": 1, "head-dim": 64,
        "intermediate": 1536, "vocab": 1024,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parse_options(
        parser,
        arguments,
        cases=["*/arpo/*"],
        repeats=1,
        layers=1,
        hidden=64,
        intermediate=64,
        vocab=64,
    )
    if args.job is not None:
        run_job(Job(**{k: tuple(v) if isinstance(v, list) else v for k, v in args.job.items()}))
    try:
        chosen = select_cases(args.cases, CASES)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_model(args, folder)
        for name in BATCHES:
            if any(case.split("/")[1] == name for case in chosen):
                for line in measure_batch(name, chosen, folder, args):
                    print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
