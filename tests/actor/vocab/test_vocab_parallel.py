"""The whole head on one and two tensor ranks; every kernel runs the checks of `vocab_cases`."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.vocab.vocab_parallel import (
    IGNORED_TARGET,
    VocabKernel,
    VocabShard,
    _select_kernel,
    logp_and_entropy,
)
from mega_agentrl.errors import InputError
from mega_agentrl.runtime.free_port import free_port
from tests.actor.vocab.vocab_rank import RANK_CHECKS, run_checks
from tests.triton_interpreter import run_in_interpreter


def whole(num_valid, scratch_bytes=100, **fields):
    return VocabShard(
        first_token_id=0,
        num_valid_rows=num_valid,
        group=None,
        scratch_bytes=scratch_bytes,
        **fields,
    )


def test_two_tensor_ranks_pass_all_checks(rank_pool):
    first, second = rank_pool.run(run_checks, 2, "torch", list(RANK_CHECKS))
    assert first == second == list(RANK_CHECKS)


@pytest.mark.parametrize(
    "scope",
    [
        pytest.param("exchanges", marks=pytest.mark.extended),
        pytest.param("all", marks=pytest.mark.slow(10)),
    ],
)
def test_two_tensor_ranks_pass_all_checks_with_triton(scope):
    """The interpreter is chosen before the kernels are imported: in a process of its own."""
    checks = ["check_exchanges"] if scope == "exchanges" else list(RANK_CHECKS)
    arguments = ["triton", "2", str(free_port()), *checks]
    run_in_interpreter("tests/actor/vocab/vocab_rank.py", *arguments)


def test_log_probs_and_entropies_of_two_tokens_are_those_worked_out_by_hand():
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
def test_gradients_of_both_outputs_are_their_slopes_in_float64(scratch_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.tensor([0, 4, IGNORED_TARGET, 1])

    def run(hidden, weight):
        return logp_and_entropy(hidden, weight, target, 0.7, whole(5, scratch_bytes))

    assert torch.autograd.gradcheck(run, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[1], (hidden, weight))


@pytest.mark.parametrize(
    ("changes", "name", "got"),
    [
        ({"weight_VD": torch.zeros(3, 5)}, "shapes of hidden and weight", "(2, 4) and (3, 5)"),
        ({"target_N": torch.zeros(1).long()}, "shape of target", (1,)),
        ({"temperature": 0}, "rollout.temperature", 0),
        ({"shard": whole(4)}, "num_valid_rows", 4),
        (
            {"hidden_ND": torch.zeros(2, 4).bfloat16()},
            "dtypes of hidden and weight",
            "torch.bfloat16 and torch.float32",
        ),
    ],
    ids=["weight", "target", "temperature", "rows", "dtype"],
)
def test_wrong_shapes_and_temperature_are_named(changes, name, got):
    arguments = {
        "hidden_ND": torch.zeros(2, 4),
        "weight_VD": torch.zeros(3, 4),
        "target_N": torch.zeros(2).long(),
        "temperature": 1.0,
        "shard": whole(3),
    }
    with pytest.raises(InputError) as caught:
        logp_and_entropy(**(arguments | changes))
    assert (caught.value.name, caught.value.got) == (name, got)


@pytest.mark.parametrize("wrong", [3, 99, -1])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    target = torch.tensor([IGNORED_TARGET, wrong])
    with pytest.raises(InputError) as caught:
        logp_and_entropy(torch.zeros(2, 4), torch.zeros(5, 4), target, 1.0, whole(3))
    assert (caught.value.name, caught.value.got) == ("target of token 1", wrong)


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
