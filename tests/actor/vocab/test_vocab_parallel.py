from __future__ import annotations

import os
import socket
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    script = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "tests" / "actor" / "vocab" / "vocab_rank.py"),
    ]
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


def test_padding_rows_never_count():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator)
    weight = torch.randn(8, 4, generator=generator, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4])
    padded = torch.cat([weight[:6], torch.full((2, 4), 1e4)])
    expected = logp_and_entropy(hidden, weight[:6], target, 1.0, whole(6))
    got = logp_and_entropy(hidden, padded, target, 1.0, whole(6))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right)
    logp_and_entropy(hidden, weight, target, 1.0, whole(6))[0].sum().backward()
    assert weight.grad[6:].abs().max() == 0
    assert weight.grad[:6].abs().min() > 0


def test_chunks_do_not_change_values_or_gradients():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, 4, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    target = torch.randint(0, 6, (11,), generator=generator)
    outcomes = []
    for scratch_bytes in (1, 100, 1 << 20):
        given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logp, entropy = logp_and_entropy(*given, target, 1.0, whole(6, scratch_bytes))
        (logp.sum() + 0.3 * entropy.square().sum()).backward()
        outcomes.append([logp, entropy, *(value.grad for value in given)])
    for other in outcomes[1:]:
        for left, right in zip(other, outcomes[0], strict=True):
            torch.testing.assert_close(left, right)


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logp, entropy = logp_and_entropy(hidden, weight, torch.tensor([0, 0]), 1.0, whole(3))
    assert logp.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]


def test_wrong_shapes_and_temperature_are_named():
    hidden, weight, target = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"weight \(3, 5\)"):
        logp_and_entropy(hidden, torch.zeros(3, 5), target, 1.0, whole(3))
    with pytest.raises(ValueError, match=r"target \(1,\)"):
        logp_and_entropy(hidden, weight, target[:1], 1.0, whole(3))
    with pytest.raises(ValueError, match=r"rollout.temperature=0"):
        logp_and_entropy(hidden, weight, target, 0, whole(3))
    with pytest.raises(ValueError, match=r"num_valid_rows=4, expected 0 to 3"):
        logp_and_entropy(hidden, weight, target, 1.0, whole(4))
    with pytest.raises(ValueError, match=r"torch.bfloat16 and weight torch.float32"):
        logp_and_entropy(hidden.bfloat16(), weight, target, 1.0, whole(3))


@pytest.mark.parametrize("wrong", [3, 99, -1])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    target = torch.tensor([IGNORED_TARGET, wrong])
    with pytest.raises(ValueError, match=rf"target {wrong} of token 1 is in no rank's rows"):
        logp_and_entropy(torch.zeros(2, 4), torch.zeros(5, 4), target, 1.0, whole(3))


def test_ignored_tokens_are_zero_and_pull_nothing():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 4, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, requires_grad=True)
    target = torch.tensor([2, IGNORED_TARGET, 5])
    logp, entropy = logp_and_entropy(hidden, weight, target, 1.0, whole(6))
    assert logp[1] == entropy[1] == 0
    (logp.sum() + entropy.sum()).backward()
    assert not hidden.grad[1].any()
    with_it = weight.grad.clone()
    weight.grad = None
    kept = torch.tensor([0, 2])
    logp, entropy = logp_and_entropy(hidden[kept], weight, target[kept], 1.0, whole(6))
    (logp.sum() + entropy.sum()).backward()
    torch.testing.assert_close(weight.grad, with_it)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_either_input_may_need_no_gradient(frozen):
    generator = torch.Generator().manual_seed(6)
    given = {
        "hidden": torch.randn(5, 4, generator=generator),
        "weight": torch.randn(6, 4, generator=generator),
    }
    moving = given[{"hidden": "weight", "weight": "hidden"}[frozen]].requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 4])
    logp_and_entropy(**_named(given), target_N=target, temperature=1.0, shard=whole(6))[
        0
    ].sum().backward()
    alone = moving.grad.clone()
    moving.grad = None
    given[frozen].requires_grad_()
    logp_and_entropy(**_named(given), target_N=target, temperature=1.0, shard=whole(6))[
        0
    ].sum().backward()
    torch.testing.assert_close(moving.grad, alone)


def _named(given):
    return {"hidden_ND": given["hidden"], "weight_VD": given["weight"]}


def test_a_cpu_computes_with_torch_unless_told_otherwise():
    pytest.importorskip("triton")
    hidden = torch.zeros(1, 4)
    assert _select_kernel(hidden, whole(3)).__name__.endswith("torch_kernel")
    assert _select_kernel(hidden, whole(3, kernel=VocabKernel.triton)).__name__.endswith(
        "triton_kernel"
    )
