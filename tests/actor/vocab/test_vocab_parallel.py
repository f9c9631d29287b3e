"""The whole head on one and two tensor ranks; every kernel runs the checks of `vocab_cases`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mega_agentrl.actor.vocab.vocab_parallel import (
    IGNORED_TARGET,
    VocabKernel,
    VocabShard,
    _select_kernel,
    logp_and_entropy,
)
from mega_agentrl.runtime.free_port import free_port
from tests.actor.vocab.vocab_cases import CHECKS
from tests.actor.vocab.vocab_rank import check_all, check_exchanges

ROOT = Path(__file__).parents[3]
DEADLINE_S = 500.0


def whole(num_valid, scratch_bytes=100, **fields):
    return VocabShard(
        first_token_id=0,
        num_valid_rows=num_valid,
        group=None,
        scratch_bytes=scratch_bytes,
        **fields,
    )


def run_checks(folder, kernel, size, **environment):
    """Run `vocab_rank.py` as `size` tensor ranks; a failure or the deadline ends all of them."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    script = [sys.executable, "-W", "ignore", str(ROOT / "tests/actor/vocab/vocab_rank.py")]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                command = [*script, kernel, str(rank), str(size), str(port)]
                processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
        ends_at = time.monotonic() + DEADLINE_S
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < ends_at:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * size, "\n".join(log.read_text()[-3000:] for log in logs)


def test_two_tensor_ranks(rank_pool):
    first, second = rank_pool.run(check_all, 2, "torch")
    assert first == second == [check.__name__ for check in (*CHECKS, check_exchanges)]


def test_two_tensor_ranks_with_triton(tmp_path):
    run_checks(tmp_path, "triton", 2, TRITON_INTERPRET="1")


def test_two_tokens_by_hand():
    # Logits ln 1, ln 3: probabilities 1/4, 3/4; at temperature 0.5 1/10, 9/10.
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([1.0, 3.0]).log()[:, None]
    target = torch.tensor([1, 0])
    logp, entropy = logp_and_entropy(hidden, weight, target, 1.0, whole(2))
    assert logp.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy[0].item() == pytest.approx(0.562335, abs=1e-6)
    logp, entropy = logp_and_entropy(hidden, weight, target, 0.5, whole(2))
    assert logp.exp().tolist() == pytest.approx([0.9, 0.1])
    assert entropy[1].item() == pytest.approx(0.325083, abs=1e-6)


@pytest.mark.parametrize("scratch_bytes", [None, 200, 1])
def test_gradients_of_both_outputs_in_float64(scratch_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.tensor([0, 4, 2, IGNORED_TARGET, 1, 3, 4])

    def run(hidden, weight):
        return logp_and_entropy(hidden, weight, target, 0.7, whole(5, scratch_bytes))

    assert torch.autograd.gradcheck(run, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[1], (hidden, weight))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_VD": torch.zeros(3, 5)}, r"weight \(3, 5\)"),
        ({"target_N": torch.zeros(1).long()}, r"target \(1,\)"),
        ({"temperature": 0}, "rollout.temperature=0"),
        ({"shard": whole(4)}, "num_valid_rows=4"),
        ({"hidden_ND": torch.zeros(2, 4).bfloat16()}, "torch.bfloat16 and weight torch.float32"),
    ],
    ids=["weight", "target", "temperature", "rows", "dtype"],
)
def test_wrong_shapes_and_temperature_are_named(changes, message):
    arguments = {
        "hidden_ND": torch.zeros(2, 4),
        "weight_VD": torch.zeros(3, 4),
        "target_N": torch.zeros(2).long(),
        "temperature": 1.0,
        "shard": whole(3),
    }
    with pytest.raises(ValueError, match=message):
        logp_and_entropy(**(arguments | changes))


@pytest.mark.parametrize("wrong", [3, 99, -1])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    target = torch.tensor([IGNORED_TARGET, wrong])
    with pytest.raises(ValueError, match=f"target {wrong} of token 1"):
        logp_and_entropy(torch.zeros(2, 4), torch.zeros(5, 4), target, 1.0, whole(3))


@pytest.mark.parametrize("frozen", ["hidden_ND", "weight_VD"])
def test_either_input_may_need_no_gradient(frozen):
    generator = torch.Generator().manual_seed(6)
    inputs = {
        "hidden_ND": torch.randn(5, 4, generator=generator),
        "weight_VD": torch.randn(6, 4, generator=generator),
    }
    (trained,) = (inputs[name].requires_grad_() for name in inputs if name != frozen)
    gradients = []
    for _ in range(2):
        trained.grad = None
        logp_N, _ = logp_and_entropy(
            **inputs, target_N=torch.arange(5), temperature=1.0, shard=whole(6)
        )
        logp_N.sum().backward()
        gradients.append(trained.grad)
        inputs[frozen].requires_grad_()  # for the second time
    torch.testing.assert_close(*gradients)


def test_a_cpu_computes_with_torch_unless_told_otherwise():
    pytest.importorskip("triton")
    hidden = torch.zeros(1, 4)
    assert _select_kernel(hidden, whole(3)).__name__.endswith("torch_kernel")
    assert _select_kernel(hidden, whole(3, kernel=VocabKernel.triton)).__name__.endswith(
        "triton_kernel"
    )
