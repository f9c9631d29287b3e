"""Benchmarks the driver's computations between rollout and update on one core.

    python tools/bench_driver.py [--quick] [--rows 4096] [--tokens 8192] [--share 64]
        [--cases PATTERN ...]

A line has the keys bench, case, unit, ours, baseline and ratio = baseline / ours. The baseline
computes the same in plain Python, one trajectory and token at a time. It gets one trajectory in
`--share`, and its seconds are scaled up; both sides must agree on these trajectories. Trajectories
are in groups of 8, and each pair of forks shares the first third of its tokens:

    seconds/advantages   GRPO, RLOO, both REINFORCE++, GAE, the hard advantage, EGPO with its
                         chain of thought, AEPO's scale
    seconds/ares         from the trajectories' records: windows, percentiles, counts, shaping, KL
                         weights, measured KL, the controllers' step
    seconds/corrections  truncated importance weights, and all mismatch metrics
    seconds/together     the sum of the three
    memory/together      peak MiB beyond the batch; the baseline is one float64 copy of each of the
                         batch's nine [B, T] fields
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo import ares
from mega_agentrl.algo.aepo import entropy_scaled
from mega_agentrl.algo.correction import importance_weights
from mega_agentrl.algo.egpo import cot_entropy, cot_mask, egpo
from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import ResidentMemory
from mega_agentrl.train.ares import shaping as ares_shaping
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.types.batch import TrainBatch
from mega_agentrl.types.records import Prompt, RolloutTree, Score, StopReason, Trajectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.measurement import bench_line, parse_options, select_cases  # noqa: E402

GROUP = 8
OPEN, CLOSE = 1, 2
CASES = (
    "seconds/advantages",
    "seconds/ares",
    "seconds/corrections",
    "seconds/together",
    "memory/together",
)
TOLERANCE = 1e-4


class SyntheticBatch:
    """The tensors of a batch of trajectories of 16 turns, each of which ends with a tool's answer.

    Rows 2k and 2k + 1 share the nodes of their first third.
    """

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (num_rows, num_tokens)
        self.reward_B = torch.randint(0, 11, (num_rows,), generator=random) / 10
        self.group_B = torch.arange(num_rows) // GROUP
        turn = num_tokens // 16
        self.mask_BT = (torch.arange(num_tokens) % turn < turn - turn // 8).expand(shape)
        self.entropy_BT = torch.rand(shape, generator=random)
        self.logp_BT = -self.entropy_BT
        self.rollout_BT = self.logp_BT + 0.1 * (self.entropy_BT - 0.5)
        self.token_BT = torch.zeros(shape, dtype=torch.int64)
        self.token_BT[:, 3], self.token_BT[:, num_tokens // 2] = OPEN, CLOSE
        self.tree_token_BT = torch.arange(num_rows * num_tokens).view(shape)
        shared = num_tokens // 3
        self.tree_token_BT[1::2, :shared] = self.tree_token_BT[0::2, :shared]

    def slice_rows(self, num_rows: int) -> SyntheticBatch:
        """Return the batch of the first rows."""
        batch = object.__new__(SyntheticBatch)
        batch.__dict__ = {name: value[:num_rows] for name, value in vars(self).items()}
        return batch


def compute_advantages(batch: SyntheticBatch) -> dict[str, torch.Tensor]:
    """Compute all advantages, by name."""
    reward_B, group_B, mask_BT = batch.reward_B, batch.group_B, batch.mask_BT
    grpo_B = estimators.grpo(reward_B, group_B)
    last_BT = torch.zeros_like(batch.entropy_BT)
    last_BT[:, 0] = reward_B
    cot_BT = cot_mask(batch.token_BT, mask_BT, start_id=OPEN, end_id=CLOSE)
    egpo_B = egpo(grpo_B, cot_entropy(batch.entropy_BT, cot_BT))
    hard_BT = estimators.arpo_hard(grpo_B, batch.tree_token_BT, mask_BT)
    value_BT = torch.zeros_like(batch.entropy_BT)
    gae_BT, _ = estimators.gae(last_BT, value_BT, mask_BT, gamma=1.0, lam=0.95)
    scaled_BT = entropy_scaled(estimators.broadcast(egpo_B, mask_BT), batch.entropy_BT, mask_BT)
    return {
        "grpo": grpo_B,
        "rloo": estimators.rloo(reward_B, group_B),
        "egpo": egpo_B,
        "hard": hard_BT.sum(1),
        "reinforce": estimators.reinforce_plus_plus(last_BT, mask_BT).sum(1),
        "baseline": estimators.reinforce_plus_plus_baseline(reward_B, group_B, mask_BT).sum(1),
        "gae": gae_BT.sum(1),
        "scaled": scaled_BT.sum(1),
    }


def compute_corrections(batch: SyntheticBatch) -> dict[str, torch.Tensor]:
    """Compute the rollout corrections, by name."""
    weight_BT, figures = importance_weights(
        batch.logp_BT, batch.rollout_BT, batch.mask_BT, level="token", mode="truncated", cap=1.02
    )
    return {"weight": weight_BT.sum(1), "kl_k3": figures["kl_k3"].unsqueeze(0)}


class PackedStep:
    """The records of the trajectories, and the batch packed from them."""

    def __init__(self, batch: SyntheticBatch) -> None:
        num_rows, num_tokens = batch.mask_BT.shape
        placeholder = [0] * num_tokens
        self.trees = [
            RolloutTree(prompt=group[0].prompt, trajectories=group)
            for group in (
                [_record(batch, row, placeholder) for row in range(start, start + GROUP)]
                for start in range(0, num_rows, GROUP)
            )
        ]
        self.batch = TrainBatch(
            prompt_ids=((),) * num_rows,
            response_BT=batch.token_BT,
            length_B=torch.full((num_rows,), num_tokens),
            mask_BT=batch.mask_BT,
            group_B=batch.group_B,
            reward_B=batch.reward_B,
            tree_token_BT=batch.tree_token_BT,
            rollout_logp_BT=batch.rollout_BT,
            rollout_entropy_BT=batch.entropy_BT,
            version_BT=torch.zeros((), dtype=torch.int64).expand(batch.mask_BT.shape),
            old_logp_BT=batch.logp_BT,
            ref_logp_BT=batch.rollout_BT,
        )


def _record(batch: SyntheticBatch, row: int, placeholder: list[int]) -> Trajectory:
    """Return the trajectory of a row; shaping does not read lists that are `placeholder`."""
    num_tokens = batch.mask_BT.shape[1]
    reward = float(batch.reward_B[row])
    return Trajectory(
        trajectory_id=f"t{row}",
        prompt=Prompt(
            prompt_id=f"p{row // GROUP}",
            data_source="bench",
            messages=(),
            ground_truth="",
            token_ids=(),
        ),
        path=(row % GROUP,),
        token_ids=placeholder,
        loss_mask=batch.mask_BT[row].int().tolist(),
        logps=placeholder,
        entropies=batch.entropy_BT[row].tolist(),
        versions=placeholder,
        turn_ids=(torch.arange(num_tokens) // (num_tokens // 16)).tolist(),
        turns=[],
        stop_reason=StopReason.eos,
        score=Score(value=reward, correct=reward >= 0.5, f1=0.0, answer="", reason=""),
    )


def compute_shaping(step: PackedStep) -> dict[str, torch.Tensor]:
    """Compute ARES's shaping as a training step does, by name."""
    before = Controllers()
    stats = collect_entropy_stats(step.trees, None)
    ares_step = ares_shaping.start_ares_step(
        stats, before.ares, ares.PAPER_HYPERPARAMS, filtered=False
    )
    batch = ares_shaping.add_entropy_rewards(step.batch, step.trees, ares_step)
    weight_BT = ares_shaping.token_kl_weights(batch, step.trees, ares_step)
    after = ares_shaping.update_controllers(
        before, ares_step, ares_shaping.mean_ref_kl(batch, step.trees, ares_step, "k3")
    )
    assert weight_BT is not None and after.ares.threshold is not None
    hwe_B = ares_step.ares_stats.hwe_B
    return {"hwe": hwe_B, "p95": stats.entropy_p95_B, "weight": weight_BT.sum(1)}


def reference_advantages(batch: SyntheticBatch) -> dict[str, list[float]]:
    """Compute the most expensive advantages one trajectory and token at a time."""
    rewards, groups = batch.reward_B.tolist(), batch.group_B.tolist()
    mask, entropy = batch.mask_BT.tolist(), batch.entropy_BT.tolist()
    tokens, tree_tokens = batch.token_BT.tolist(), batch.tree_token_BT.tolist()
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    scalars = [
        (reward - fmean(members[group])) / (stdev(members[group]) + 1e-6)
        for reward, group in zip(rewards, groups, strict=True)
    ]
    scalars_of: dict[int, list[float]] = {}
    for scalar, row in zip(scalars, tree_tokens, strict=True):
        for token in row:
            scalars_of.setdefault(token, []).append(scalar)
    hard = [
        sum(fmean(scalars_of[token]) for token, on in zip(row, mask_row, strict=True) if on)
        for row, mask_row in zip(tree_tokens, mask, strict=True)
    ]
    with_bonus = []
    for scalar, row, mask_row, values in zip(scalars, tokens, mask, entropy, strict=True):
        start, end = row.index(OPEN) + 1, row.index(CLOSE)
        inside = [values[at] for at in range(start, end) if mask_row[at]]
        bound = abs(scalar) / 2.0
        with_bonus.append(scalar + 0.4 * max(-bound, min(bound, fmean(inside))))
    return {"grpo": scalars, "hard": hard, "egpo": with_bonus}


def reference_shaping(batch: SyntheticBatch, threshold: float) -> dict[str, list[float]]:
    """Compute entropy windows and their counts one token at a time."""
    counts = []
    for values, mask_row in zip(batch.entropy_BT.tolist(), batch.mask_BT.tolist(), strict=True):
        windows = [
            sum(values[at + 1 : at + 5]) / 4
            for at in range(len(values) - 4)
            if all(mask_row[at : at + 5])
        ]
        counts.append(float(sum(window >= threshold for window in windows)))
    return {"hwe": counts}


def reference_corrections(batch: SyntheticBatch) -> dict[str, list[float]]:
    """Compute the corrections one token at a time."""
    weights, k3, number = [], 0.0, 0
    for train, sampled, mask_row in zip(
        batch.logp_BT.tolist(), batch.rollout_BT.tolist(), batch.mask_BT.tolist(), strict=True
    ):
        gaps = [a - b for a, b, on in zip(train, sampled, mask_row, strict=True) if on]
        weights.append(sum(min(math.exp(gap), 1.02) for gap in gaps))
        k3 += sum(math.exp(gap) - 1 - gap for gap in gaps)
        number += len(gaps)
    return {"weight": weights, "kl_k3": [k3 / number]}


def check_agreement(
    ours: dict[str, torch.Tensor], baseline: dict[str, list[float]], tolerance: float
) -> None:
    """Raise `RuntimeError` if the two sides differ."""
    for name, values in baseline.items():
        expected_B = torch.tensor(values, dtype=torch.float64)
        gap_B = (ours[name].double() - expected_B).abs() / expected_B.abs().clamp(min=1)
        if float(gap_B.max()) > tolerance:
            raise RuntimeError(f"{name}: ours and the baseline differ by {float(gap_B.max()):.3g}")


def measure_cpu_s[ResultT](
    function: Callable[..., ResultT], *arguments: Any
) -> tuple[float, ResultT]:
    """Return the processor seconds of a call and its result."""
    start_s = time.process_time()
    result = function(*arguments)
    return time.process_time() - start_s, result


def measure(num_rows: int, num_tokens: int, share: int) -> dict[str, tuple[float, float]]:
    """Return the value of each case for our code and for the baseline."""
    batch = SyntheticBatch(num_rows, num_tokens)
    part = batch.slice_rows(max(GROUP, num_rows // share // GROUP * GROUP))
    scale = num_rows / len(part.reward_B)
    step = PackedStep(batch)
    before_bytes = ResidentMemory.current().peak_bytes
    ours = {
        "seconds/advantages": measure_cpu_s(compute_advantages, batch)[0],
        "seconds/ares": measure_cpu_s(compute_shaping, step)[0],
        "seconds/corrections": measure_cpu_s(compute_corrections, batch)[0],
    }
    added_mib = (ResidentMemory.current().peak_bytes - before_bytes) / MIB
    del step  # otherwise the garbage collector would visit it during the baseline
    plain_s, plain = measure_cpu_s(reference_advantages, part)
    check_agreement(compute_advantages(part), plain, TOLERANCE)
    shaped = compute_shaping(PackedStep(part))
    state = ares.update_threshold(ares.AresState(), shaped["p95"])
    assert state.threshold is not None
    plain_ares_s, plain = measure_cpu_s(reference_shaping, part, state.threshold)
    # A window at the threshold itself falls on either side of it by rounding.
    check_agreement(shaped, plain, 0.01)
    plain_corrections_s, plain = measure_cpu_s(reference_corrections, part)
    check_agreement(compute_corrections(part), plain, TOLERANCE)
    baseline = (plain_s * scale, plain_ares_s * scale, plain_corrections_s * scale)
    copies_mib = 9 * 8 * num_rows * num_tokens / MIB
    return {
        **{case: (ours[case], value) for case, value in zip(ours, baseline, strict=True)},
        "seconds/together": (sum(ours.values()), sum(baseline)),
        "memory/together": (added_mib, copies_mib),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--share", type=int, default=64)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    args = parse_options(parser, arguments, rows=32, tokens=256, share=1)
    if args.rows % GROUP or args.rows < GROUP or args.tokens < 16:
        parser.error(f"expected --rows a multiple of {GROUP} and --tokens at least 16")
    try:
        chosen = select_cases(args.cases, CASES)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    values = measure(args.rows, args.tokens, args.share)
    for case in chosen:
        ours, baseline = values[case]
        unit = "s" if case.startswith("seconds") else "MiB"
        print(json.dumps(bench_line("driver", case, unit, ours, baseline)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
