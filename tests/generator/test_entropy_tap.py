"""The tap's maths by hand, and the way of its values through vLLM's log-probs.

`test_live_engine` has the V1 sampler in a worker, `test_entropy_tap_on_gpu` that of V2.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import LogprobsTensors

from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, VocabShard, logp_and_entropy
from mega_agentrl.generator.entropy_tap import (
    Measurements,
    TapRecord,
    attach_measurements,
    measure_logits,
    read_measurements,
    tap_sampler,
)
from mega_agentrl.numerics.exact_sums import FixedPointRows, exact_matmul
from tests.generator.tap_cases import CHECKS, V2Sampler, step_of
from tests.triton_interpreter import run_in_interpreter


def test_two_equal_tokens_have_entropy_log_2_at_any_temperature():
    logits_RV = torch.tensor([[1.0, 1.0, -math.inf], [0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]])
    got = measure_logits(logits_RV, torch.tensor([1.0, 0.5, 0.0]))
    assert got.entropy_R.tolist() == pytest.approx([math.log(2)] * 3)
    assert got.logp_RV[:, :2].flatten().tolist() == pytest.approx([-math.log(2)] * 6)
    assert got.argmax_R.tolist()[0] in (0, 1)


@pytest.mark.parametrize("exact", [False, True], ids=["ordinary", "exact"])
@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 3.0), offset=st.floats(-30, 30))
def test_log_probs_and_entropies_are_those_at_the_temperature(exact, seed, temperature, offset):
    logits_RV = torch.randn(3, 50, generator=torch.manual_seed(seed)) * 5 + offset
    got = measure_logits(logits_RV, torch.full((3,), temperature), exact=exact)
    expected_RV = (logits_RV.double() / temperature).log_softmax(-1)
    assert got.logp_RV.dtype == got.entropy_R.dtype == torch.float32
    assert torch.allclose(got.logp_RV.double(), expected_RV, atol=2e-4)
    entropy_R = -(expected_RV.exp() * expected_RV).sum(-1)
    assert torch.allclose(got.entropy_R.double(), entropy_R, atol=1e-4)
    assert bool((got.logp_RV <= 0).all())


def test_exact_log_probs_are_those_of_the_policy_bit_by_bit():
    """0.7 is another number in float32, in which vLLM has it, and in float64."""
    generator = torch.manual_seed(1)
    hidden_ND, weight_VD = (torch.randn(n, 16, generator=generator) for n in (9, 50))
    target_N = torch.randint(50, (9,), generator=generator)
    shard = VocabShard(first_token_id=0, num_valid_rows=50, group=None, kernel=VocabKernel.exact)
    expected_N, entropy_N = logp_and_entropy(hidden_ND, weight_VD, target_N, 0.7, shard)
    rows = FixedPointRows.from_rows(weight_VD)
    logits_NV = exact_matmul(hidden_ND, rows, num_terms=16).float()
    got = measure_logits(logits_NV, torch.full((9,), 0.7), exact=True)
    assert torch.equal(got.logp_RV.gather(1, target_N[:, None])[:, 0], expected_N)
    assert torch.equal(got.entropy_R, entropy_N)


def log_probs(sampled, *columns):
    """vLLM's log-probs of rows with these sampled tokens, whose ids share its memory."""
    ids_RK = torch.tensor(sampled)[:, None]
    for column in columns:
        ids_RK = torch.cat([ids_RK, torch.tensor(column)[:, None]], dim=1)
    return LogprobsTensors(ids_RK, torch.zeros(ids_RK.shape), torch.ones(len(sampled)).long())


def as_returned(tensors, num_logprobs=0):
    """The log-probs of a request whose tokens were these rows, as vLLM returns them."""
    flat = FlatLogprobs()
    for ids, logps, rank in zip(*(array.tolist() for array in tensors.tolists()[:3]), strict=True):
        flat.append_fast(ids, logps, iter((rank, *range(1, num_logprobs + 1))), [None] * len(ids))
    return flat


def test_measurements_come_back_exactly():
    # The second row has the smallest entropy of float32, the third one below 0 by rounding.
    tiny = torch.finfo(torch.float32).smallest_normal / 2**23
    logp_RV = torch.full((4, 5), -9.0)
    logp_RV[range(4), [1, 2, 3, 4]] = torch.tensor([-3.5, 0.0, -1e30, -0.0])
    measured = Measurements(
        logp_RV,
        torch.tensor([1.25, tiny, -1e-7, 0.0]),
        torch.tensor([151_935, 0, 7, 2**31 - 1]),
    )
    sent = attach_measurements(log_probs([1, 2, 3, 4]), measured)
    assert read_measurements(as_returned(sent)) == TapRecord(
        logps=(-3.5, 0.0, float(np.float32(-1e30)), 0.0),
        entropies=(1.25, tiny, 0.0, 0.0),
        argmax_ids=(151_935, 0, 7, 2**31 - 1),
    )


def test_alternatives_and_sampled_ids_stay_as_they_are():
    tensors = log_probs([1, 2], [5, 6], [7, 8])
    measured = Measurements(torch.zeros(2, 9), torch.ones(2), torch.tensor([5, 6]))
    sent = attach_measurements(tensors, measured)
    assert sent.logprob_token_ids.tolist() == [[5, 5, 7], [6, 6, 8]]
    assert tensors.logprob_token_ids[:, 0].tolist() == [1, 2]
    assert read_measurements(as_returned(sent, num_logprobs=2)).argmax_ids == (5, 6)


def test_a_rank_is_not_taken_for_a_measurement():
    measured = Measurements(torch.zeros(1, 9), torch.ones(1), torch.tensor([5]))
    flat = as_returned(attach_measurements(log_probs([1]), measured))
    flat.append_fast([1], [0.0], iter([300]), [None])
    with pytest.raises(RuntimeError):
        read_measurements(flat)


def test_requests_without_log_probs_are_sampled_as_without_the_tap():
    sampler = tap_sampler(V2Sampler([1.0], has_logprobs=False))
    assert sampler(torch.zeros(1, 2), step_of([0])).logprobs_tensors is None
    assert sampler.temperatures == [1.0]


@pytest.mark.extended
def test_the_kernel_passes_its_checks_in_tritons_interpreter():
    pytest.importorskip("triton")
    lines = run_in_interpreter("tests/generator/tap_cases.py")
    passed = [line for line in lines if line.endswith(" passed")]
    assert passed == [f"{check.__name__} passed" for check in CHECKS]


def test_the_kernel_compiles_for_hopper_with_wide_loads(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mega_agentrl.generator import entropy_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = entropy_kernel._measure_kernel
    types = {
        "row_stride": "i32",
        "sampled_stride": "i32",
        "num_tokens": "i32",
        "sampled_ptr": "*i64",
        "slot_ptr": "*i32",
        "bits_ptr": "*i64",
        "argmax_ptr": "*i64",
        "BLOCK": "constexpr",
    }
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in ("logits_ptr", "row_stride", "num_tokens")
    }
    compiled = triton.compile(
        ASTSource(
            kernel,
            {name: types.get(name, "*fp32") for name in kernel.arg_names},
            constexprs={"BLOCK": entropy_kernel.BLOCK},
            attrs=even,
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": entropy_kernel.NUM_WARPS},
    )
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
