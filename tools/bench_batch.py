"""Benchmarks how a batch reaches the ranks of the policy, without a model and without Ray.

    python tools/bench_batch.py [--quick] [--rows 512] [--tokens 4096] [--data 8] [--minibatches 4]
        [--cases PATTERN ...]

A step computes log-probs and reference log-probs and updates the policy. Rows have between 64 and
`--tokens` tokens, a quarter of them prompt; the ranks of each of the `--data` data ranks share a
machine. A line has the keys bench, case, unit, ours, baseline and
ratio = baseline / ours:

    ours       `runtime.workers.batch_sender.BatchSender`: each data rank gets its rows, packed, and
               refers to them again; numpy arrays are mapped, not copied
    baseline   the whole padded batch, pickled for scoring and again for the update; each rank
               unpickles it in each of its three calls

    sent/step       MiB that leave the driver's machine in a step
    received/rank   MiB that a rank unpickles or maps in a step, mean over the ranks
    seconds/driver  to pack and pickle what is sent in a step
    seconds/rank    to unpickle what is received in a step, and to gather the rows of the update
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.batch.packed_rows import POLICY_TARGETS  # noqa: E402
from mega_agentrl.config.schema import TrainConfig  # noqa: E402
from mega_agentrl.config.sections.policy import ModelConfig, OptimConfig, ParallelConfig  # noqa: E402
from mega_agentrl.estimate.device import MIB  # noqa: E402
from mega_agentrl.runtime.workers.batch_sender import BatchSender  # noqa: E402
from mega_agentrl.types.batch import TrainBatch  # noqa: E402
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402

CASES = ("sent/step", "received/rank", "seconds/driver", "seconds/rank")
SHORTEST = 64
NUM_BASELINE_CALLS = 3
"""Log-probs, reference log-probs, update."""


@dataclass
class StoredObject:
    """A pickled object, with its arrays apart as in Ray's object store."""

    data: bytes
    buffers: list[pickle.PickleBuffer] = field(default_factory=list)

    @classmethod
    def put(cls, value: Any) -> StoredObject:
        """Pickle an object."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(data, buffers)

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def get(self) -> Any:
        """Unpickle the object; its arrays are not copied."""
        return pickle.loads(self.data, buffers=self.buffers)


def make_batch(num_rows: int, max_tokens: int) -> TrainBatch:
    """Return a batch that is ready for an update."""
    random = torch.Generator().manual_seed(0)
    total_B = torch.randint(SHORTEST, max_tokens + 1, (num_rows,), generator=random)
    prompt_B = total_B // 4
    length_B = total_B - prompt_B
    shape = (num_rows, int(length_B.max()))
    inside_BT = torch.arange(shape[1]) < length_B[:, None]
    logp_BT = -torch.rand(shape, generator=random) * inside_BT
    token_BT = torch.randint(0, 150_000, shape, generator=random) * inside_BT
    return TrainBatch(
        prompt_ids=tuple(
            tuple(torch.randint(0, 150_000, (size,), generator=random).tolist())
            for size in prompt_B.tolist()
        ),
        response_BT=token_BT,
        length_B=length_B,
        mask_BT=inside_BT,
        group_B=torch.arange(num_rows) // 8,
        reward_B=torch.zeros(num_rows),
        tree_token_BT=torch.arange(num_rows * shape[1]).view(shape),
        rollout_logp_BT=logp_BT,
        rollout_entropy_BT=-logp_BT,
        version_BT=torch.zeros(shape, dtype=torch.int64),
        old_logp_BT=logp_BT + 0.01,
        entropy_BT=-logp_BT,
        ref_logp_BT=logp_BT - 0.01,
        advantage_BT=logp_BT + 0.5,
    )


def measure_s[ResultT](function: Callable[..., ResultT], *arguments: Any) -> tuple[float, ResultT]:
    """Return the seconds of a call and its result."""
    start_s = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start_s, result


def check_shard(batch: TrainBatch, update: Any, scored: Any) -> None:
    """Raise `RuntimeError` if a data rank does not have the rows of the batch."""
    rows = update.gather_rows(scored)
    sequences = rows.sequences(range(rows.num_rows))
    logp_RT = update.targets.padded("old_logp", range(rows.num_rows))
    for index, row in enumerate(rows.row_R.tolist()):
        length = int(batch.length_B[row])
        tokens = [*batch.prompt_ids[row], *batch.response_BT[row, :length].tolist()]
        same_values = torch.equal(logp_RT[index, :length], batch.old_logp_BT[row, :length])
        if sequences[index].tolist() != tokens or not same_values:
            raise RuntimeError(f"row {row}: the data rank got other tokens or log-probs")


def measure(args: argparse.Namespace, model_folder: str) -> dict[str, tuple[float, float]]:
    """Return the value of each case for our code and for the baseline.

    Data ranks are balanced by the cost of the model whose config.json is in `model_folder`.
    """
    batch = make_batch(args.rows, args.tokens)
    sender = BatchSender(
        TrainConfig(
            model=ModelConfig(path=model_folder),
            parallel=ParallelConfig(data=args.data),
            optim=OptimConfig(num_minibatches=args.minibatches),
        ),
        put=StoredObject.put,
    )
    scoring_s, scored = measure_s(sender.send_for_scoring, batch)
    update_s, updates = measure_s(sender.send_for_update, batch, POLICY_TARGETS, "token_mean")
    received = [update.num_bytes + rows.num_bytes for update, rows in updates]

    def receive(update: StoredObject, rows: StoredObject) -> None:
        for _ in range(NUM_BASELINE_CALLS - 1):
            rows.get()
        update.get().gather_rows(rows.get())

    ours_rank_s = fmean(measure_s(receive, update, rows)[0] for update, rows in updates)
    for update, rows in updates:
        check_shard(batch, update.get(), rows.get())
    assert [rows for _, rows in updates] == [rows for (rows,) in scored]

    baseline_s, whole = measure_s(StoredObject.put, batch)
    unpickle_s, _ = measure_s(whole.get)
    return {
        "sent/step": (sum(received) / MIB, 2 * args.data * whole.num_bytes / MIB),
        "received/rank": (
            fmean(received) / MIB,
            NUM_BASELINE_CALLS * whole.num_bytes / MIB,
        ),
        "seconds/driver": (scoring_s + update_s, 2 * baseline_s),
        "seconds/rank": (ours_rank_s, NUM_BASELINE_CALLS * unpickle_s),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--data", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    args = parse_options(parser, arguments, rows=32, tokens=256, data=4)
    if args.tokens < SHORTEST or args.rows < args.minibatches:
        parser.error(f"expected --tokens at least {SHORTEST}, --rows at least --minibatches")
    try:
        chosen = select_cases(args.cases, CASES)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "tools" / "model_configs" / "qwen2.5-7b.json", f"{folder}/config.json")
        values = measure(args, folder)
    for case in chosen:
        ours, baseline = values[case]
        unit = "s" if case.startswith("seconds") else "MiB"
        print(json.dumps(bench_line("batch", case, unit, ours, baseline)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
