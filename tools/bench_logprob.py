"""Benchmarks time and memory of the vocabulary head, one JSON line per case.

    python tools/bench_logprob.py [--quick] [--cases PATTERN ...] [--repeats N] [--vocab V]

Cases are ``memory``, ``forward`` and ``forward_backward`` / T2048, T4096 / TP1, TP2 at hidden width
1,024, and the same with the suffix ``/H4096``; a pattern is a shell pattern over the whole name, by
default all cases of width 1,024 (``*/TP?``). With a GPU there is also ``matrix_rate`` at T 8,192,
H 4,096: bfloat16 FLOP/s of the products (2 N V D forward; 8 N V D with the backward pass, which
recomputes the logits) against one plain matrix product.

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. The baseline is
the default of verl's Megatron actor: full logits, Megatron's cross entropy on a clone of them, and
a separate entropy function with its own full softmax; gradients of both. Values are null if a case
runs out of memory, with the reason on stderr.

Each case runs in new processes: TP 2 is two processes of one thread each over gloo, TP 1 one of two
threads. Both paths alternate in the same processes, and a time is the median. `forward` needs no
gradient. Memory is that of forward and backward, with separate processes for each path: the peak of
resident memory (VmHWM, reset through /proc/self/clear_refs after inputs and weights exist), minus
the resident memory then and the bytes of both gradients, maximum over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mega_agentrl.runtime.free_port import free_port  # noqa: E402
from tools.measurement import PeakMemory, bench_line, parse_options, select_cases  # noqa: E402

VOCAB = 151_936
MIB = 1 << 20
DEADLINE_S = 3600.0
PATHS = ("ours", "baseline")


@dataclass(frozen=True)
class Case:
    """One case of the benchmark."""

    kind: str
    """What is measured: memory, forward, forward_backward or matrix_rate/..."""
    num_tokens: int
    ranks: int
    """Tensor-parallel size."""
    hidden: int
    vocab: int

    @property
    def name(self) -> str:
        """Name that the patterns are matched with."""
        suffix = "" if self.hidden == 1024 else f"/H{self.hidden}"
        return f"{self.kind}/T{self.num_tokens}/TP{self.ranks}{suffix}"


def all_cases(vocab: int) -> list[Case]:
    """Return all cases of this machine, the fast ones first."""
    cases = [
        Case(kind, tokens, ranks, hidden, vocab)
        for hidden in (1024, 4096)
        for kind in ("memory", "forward", "forward_backward")
        for tokens in (2048, 4096)
        for ranks in (1, 2)
    ]
    if torch.cuda.is_available():
        cases += [
            Case(f"matrix_rate/{kind}", 8192, 1, 4096, vocab)
            for kind in ("forward", "forward_backward")
        ]
    return cases


# ---- the two paths ------------------------------------------------------------------------


class _BaselineEntropy(torch.autograd.Function):
    """Entropy from full logits as in verl: saves a full softmax, runs three all-reduces."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor) -> torch.Tensor:
        max_N1 = logits_NV.amax(dim=-1, keepdim=True)
        dist.all_reduce(max_N1, op=dist.ReduceOp.MAX)
        softmax_NV = (logits_NV - max_N1).exp_()
        sum_N1 = softmax_NV.sum(dim=-1, keepdim=True)
        dist.all_reduce(sum_N1)
        softmax_NV.div_(sum_N1)
        # verl compiles product and sum into one pass; vecdot allocates no product either.
        mean_N1 = torch.linalg.vecdot(softmax_NV, logits_NV)[:, None].contiguous()
        dist.all_reduce(mean_N1)
        ctx.save_for_backward(logits_NV, softmax_NV, mean_N1)
        return (max_N1 + sum_N1.log() - mean_N1).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> torch.Tensor:
        logits_NV, softmax_NV, mean_N1 = ctx.saved_tensors
        logits_NV.sub_(mean_N1)
        softmax_NV.mul_(logits_NV).mul_(grad_N[:, None])
        logits_NV.add_(mean_N1)
        return softmax_NV.mul_(-1)


def baseline_path(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-prob and entropy from full logits over Megatron's tensor-parallel group."""
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        vocab_parallel_cross_entropy,
    )

    logits_NV = copy_to_tensor_model_parallel_region(hidden_ND) @ weight_VD.t()
    clone_NV = logits_NV.clone()
    entropy_N = _BaselineEntropy.apply(logits_NV)
    return -vocab_parallel_cross_entropy(clone_NV, target_N), entropy_N


def our_path(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-prob and entropy with `actor.vocab.vocab_parallel`."""
    from mega_agentrl.actor.vocab.vocab_parallel import VocabShard, logp_and_entropy

    rows = len(weight_VD)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    shard = VocabShard(first_token_id=dist.get_rank() * rows, num_valid_rows=rows, group=group)
    return logp_and_entropy(hidden_ND, weight_VD, target_N, 1.0, shard)


# ---- one rank ------------------------------------------------------------------------------


class Rank:
    """One rank: its inputs, and a step of either path over them."""

    def __init__(self, case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.case, grad = case, not case.kind.endswith("forward")
        make = torch.Generator(device).manual_seed(0)
        fields = {"device": device, "dtype": dtype, "generator": make}
        self.hidden_ND = torch.randn(case.num_tokens, case.hidden, **fields).requires_grad_(grad)
        self.target_N = torch.randint(
            0, case.vocab, (case.num_tokens,), device=device, generator=make
        )
        self.slope_2N = torch.randn(2, case.num_tokens, device=device, generator=make)
        make.manual_seed(1 + dist.get_rank())
        weight_VD = torch.randn(case.vocab // case.ranks, case.hidden, **fields)
        # Logits of about unit size, so that the entropy resembles that of a real model.
        self.weight_VD = weight_VD.mul_(case.hidden**-0.5).requires_grad_(grad)

    def step(self, path: str) -> tuple[torch.Tensor, ...]:
        """Run one step, with a backward pass if the case has one, and return both outputs."""
        self.hidden_ND.grad = self.weight_VD.grad = None
        run = {"ours": our_path, "baseline": baseline_path}[path]
        outputs = run(self.hidden_ND, self.weight_VD, self.target_N)
        if self.hidden_ND.requires_grad:
            torch.autograd.backward(outputs, list(self.slope_2N))
        return tuple(value.detach() for value in outputs)


def measure_memory(case: Case, path: str) -> dict[str, float]:
    """Return the peak MiB of one step beyond inputs, weights and gradients."""
    # Warm up: threads and buffers of the libraries do not count.
    Rank(Case(case.kind, 16, case.ranks, 64, 64)).step(path)
    rank = Rank(case)
    dist.barrier()
    memory = PeakMemory(trim=False)
    rank.step(path)
    gradients = rank.hidden_ND.grad.nbytes + rank.weight_VD.grad.nbytes
    return {path: memory.peak_mib() - gradients / MIB}


def measure_time(case: Case, repeats: int) -> dict[str, float]:
    """Return the median seconds of both paths, which alternate and must agree."""
    rank, times = Rank(case), {path: [] for path in PATHS}
    for path in PATHS:
        Rank(Case(case.kind, 16, case.ranks, 64, 64)).step(path)
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}
    for _ in range(repeats):
        for path in PATHS:
            dist.barrier()
            started = time.perf_counter()
            outputs[path] = rank.step(path)
            dist.barrier()
            times[path].append(time.perf_counter() - started)
    for ours, baseline in zip(outputs["ours"], outputs["baseline"], strict=True):
        torch.testing.assert_close(ours, baseline, rtol=1e-4, atol=1e-3)
    return {path: statistics.median(values) for path, values in times.items()}


def measure_matrix_rate(case: Case, repeats: int, device: str = "cuda") -> dict[str, float]:
    """Return the TFLOP/s of our path and of one plain product of the same size."""
    rank = Rank(case, device, torch.bfloat16)
    products = 8 if rank.hidden_ND.requires_grad else 2
    hidden_ND, weight_DV = rank.hidden_ND.detach(), rank.weight_VD.detach().t()
    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "ours": (lambda: rank.step("ours"), products),
        "baseline": (lambda: hidden_ND @ weight_DV, 2),
    }
    rates: dict[str, list[float]] = {path: [] for path in PATHS}
    for repeat in range(repeats + 2):
        for path, (run, factor) in runs.items():
            _synchronize(device)
            started = time.perf_counter()
            run()
            _synchronize(device)
            if repeat >= 2:
                flops = factor * case.num_tokens * case.vocab * case.hidden
                rates[path].append(flops / (time.perf_counter() - started) / 1e12)
    return {path: statistics.median(values) for path, values in rates.items()}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_rank(job: dict[str, Any]) -> NoReturn:
    """Run one rank of a case and exit; rank 0 prints the maxima over the ranks."""
    # The OOM killer shall choose this process.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    case = Case(**job["case"])
    torch.set_num_threads(1 if case.ranks > 1 else 2)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job['port']}",
        rank=job["rank"],
        world_size=case.ranks,
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.ranks)
    if case.kind == "memory":
        measured = measure_memory(case, job["path"])
    elif case.kind.startswith("matrix_rate"):
        measured = measure_matrix_rate(case, job["repeats"])
    else:
        measured = measure_time(case, job["repeats"])
    worst = torch.tensor(list(measured.values()), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if job["rank"] == 0:
        sys.stdout.write(json.dumps(dict(zip(measured, worst.tolist(), strict=True))) + "\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    # Threads that torch leaves running can abort the process at interpreter exit.
    os._exit(0)


# ---- all cases -----------------------------------------------------------------------------


def run_case(case: Case, repeats: int) -> dict[str, Any]:
    """Run a case and return its line."""
    measured: dict[str, float] = {}
    for path in PATHS if case.kind == "memory" else ("both",):
        result, reason = _run_ranks(case, path, repeats)
        measured |= result
        if reason:
            sys.stderr.write(f"{case.name} {path}: {reason}\n")
    ours, baseline = measured.get("ours"), measured.get("baseline")
    unit = {"memory": "MiB", "matrix_rate": "TFLOP/s"}.get(case.kind.split("/")[0], "s")
    return bench_line("logprob", case.name, unit, ours, baseline)


def _run_ranks(case: Case, path: str, repeats: int) -> tuple[dict[str, float], str]:
    """Run the ranks of a case; return their values, or none and the reason."""
    job = {"case": asdict(case), "path": path, "repeats": repeats, "port": free_port()}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["OMP_NUM_THREADS"] = "1" if case.ranks > 1 else "2"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps({**job, "rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(case.ranks)
    ]
    try:
        ends_at, codes = time.monotonic() + DEADLINE_S, [None]
        while None in codes and not any(codes) and time.monotonic() < ends_at:
            time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate() for rank in ranks]
    errors = "\n".join(error for _, error in outputs)
    if -signal.SIGKILL in codes or "allocate memory" in errors:
        return {}, "out of memory"
    if any(codes) or None in codes:
        raise RuntimeError(f"{case.name}: ranks ended with {codes}\n{errors}")
    return json.loads(outputs[0][0].splitlines()[-1]), ""


def main(arguments: list[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["*/TP?"], metavar="PATTERN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    args = parse_options(
        parser,
        arguments,
        cases=["memory/T2048/TP1", "forward_backward/T2048/TP2"],
        repeats=1,
        vocab=256,
    )
    if args.rank is not None:
        run_rank(args.rank)
    cases = {case.name: case for case in all_cases(args.vocab)}
    try:
        chosen = select_cases(args.cases, list(cases))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in chosen:
        print(json.dumps(run_case(cases[name], args.repeats)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
