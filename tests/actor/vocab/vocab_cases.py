"""Checks of every kernel of the vocabulary head, on any device, on one or several tensor ranks.

A check takes a `Place` and asserts; `CHECKS` lists them. `vocab_rank.py` runs them in processes
of their own. Suffixes: N tokens, V whole vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mega_agentrl.actor.vocab.vocab_parallel import (
    IGNORED_TARGET,
    VocabKernel,
    VocabShard,
    logp_and_entropy,
)

VOCAB = 131
SCRATCHES = (None, 6_000, 1_500)


@dataclass(frozen=True)
class Place:
    """Where a check runs: kernel, device, rank and group; the last rank has padding rows."""

    kernel: VocabKernel
    device: str = "cpu"
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def vocab_shard(self, vocab: int, **fields) -> VocabShard:
        rows = self.rows(vocab)
        return VocabShard(
            first_token_id=rows.start,
            num_valid_rows=max(0, min(rows.stop, vocab) - rows.start),
            group=self.group,
            kernel=self.kernel,
            **fields,
        )

    def rows(self, vocab: int) -> slice:
        size = -(-vocab // self.size) + 2
        return slice(self.rank * size, (self.rank + 1) * size)

    def local(self, whole_VD: torch.Tensor, padding: float = 1e3) -> torch.Tensor:
        """Return this rank's rows, with padding rows that would dominate the softmax if used."""
        rows = self.rows(len(whole_VD))
        mine = whole_VD[rows]
        filler = mine.new_full((rows.stop - rows.start - len(mine), mine.size(1)), padding)
        return torch.cat([mine, filler]).to(self.device)


def given(num_tokens, vocab, hidden, dtype=torch.float32, seed=0):
    """Return hidden states, weight, targets (some ignored) and gradients of both outputs."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weight_VD = torch.randn(vocab, hidden, generator=generator).mul(0.7).to(dtype)
    target_N = torch.randint(0, vocab, (num_tokens,), generator=generator)
    target_N[::5] = IGNORED_TARGET
    grads_2N = torch.randn(2, num_tokens, generator=generator)
    return hidden_ND, weight_VD, target_N, grads_2N


def exact(logits_NV, target_N):
    """Return log-prob and entropy in float64, 0 where ignored."""
    kept_N = target_N != IGNORED_TARGET
    logp_NV = logits_NV.double().log_softmax(-1)
    logp_N = logp_NV.gather(1, (target_N * kept_N)[:, None]).squeeze(1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return torch.where(kept_N, logp_N, 0.0), torch.where(kept_N, entropy_N, 0.0)


def run(
    place,
    hidden_ND,
    weight_VD,
    target_N,
    grads_2N,
    *,
    temperature=1.0,
    wanted=3,
    rows_of_ranks=(),
    **fields,
):
    """Return outputs and gradients of the hidden states and of this rank's rows, on the CPU.

    wanted: 1 the gradient of log-prob, 2 of entropy, 3 of both.
    """
    hidden = hidden_ND.clone().to(place.device).requires_grad_()
    weight = place.local(weight_VD).requires_grad_()
    shard = place.vocab_shard(len(weight_VD), **fields)
    target_N = target_N.to(place.device)
    outputs = logp_and_entropy(hidden, weight, target_N, temperature, shard, rows_of_ranks)
    pairs = [(outputs[i], grads_2N[i].to(outputs[i])) for i in (0, 1) if wanted & (1 << i)]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [value.detach().cpu() for value in (*outputs, hidden.grad, weight.grad)]


def reference(hidden_ND, weight_VD, target_N, grads_2N, *, temperature=1.0, wanted=3):
    """Return the same as `run`, by autograd through full float64 logits."""
    hidden, weight = (value.double().requires_grad_() for value in (hidden_ND, weight_VD))
    outputs = exact(hidden @ weight.t() / temperature, target_N)
    scale = [float(bool(wanted & 1)), float(bool(wanted & 2))]
    sum((out * grads_2N[i] * scale[i]).sum() for i, out in enumerate(outputs)).backward()
    return [value.detach() for value in (*outputs, hidden.grad, weight.grad)]


def close(got, expected, bound):
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    assert error <= bound, f"relative error {float(error):.2e} above {bound:.0e}"


def hard_logits(vocab, generator):
    """Return logits of every kind: ordinary, sharp, up to +-1e4, one-hot, uniform, tied."""
    rows = [torch.randn(vocab, generator=generator) * scale for scale in (0.1, 1, 1, 5, 30)]
    rows += [(torch.rand(vocab, generator=generator) * 2 - 1) * 1e4 for _ in range(3)]
    rows += [torch.randn(vocab, generator=generator) + offset for offset in (1e4, -1e4)]
    for height, floor in ((1e4, 0.0), (1e4, -1e4), (20.0, 0.0), (0.0, -5.0)):
        rows.append(torch.full((vocab,), floor))
        rows[-1][vocab // 3] = height
    rows += [torch.full((vocab,), level) for level in (0.0, 1e4, -1e4, 3.3)]
    rows.append(torch.where(torch.arange(vocab) % 7 == 0, 9999.0, 9990.0))
    return torch.stack(rows)


def check_accuracy(place: Place) -> None:
    """Outputs agree with float64 on the same float32 logits, also if the target is the maximum."""
    generator = torch.Generator().manual_seed(1)
    logits_NV = hard_logits(VOCAB, generator)
    tokens = len(logits_NV)
    for target_N in (torch.randint(0, VOCAB, (tokens,), generator=generator), logits_NV.argmax(1)):
        target_N[4] = IGNORED_TARGET
        # One-hot hidden states pick the columns of the weight: these logits exactly.
        for scratch in SCRATCHES:
            got = run_exact(place, logits_NV, target_N, scratch_bytes=scratch)
            check_outputs(got, exact(logits_NV, target_N))


def run_exact(place, logits_NV, target_N, **fields):
    """Return the outputs for given logits, which one-hot hidden states select in the weight."""
    return logp_and_entropy(
        torch.eye(len(logits_NV), device=place.device),
        place.local(logits_NV.t().contiguous()),
        target_N.to(place.device),
        1.0,
        place.vocab_shard(logits_NV.size(1), **fields),
    )


def check_outputs(got, expected):
    for value, truth, floor, scale in zip(got, expected, (2e-6, 1e-5), (2e-6, 0.0), strict=True):
        bound = (truth.abs() * scale).clamp(min=floor)
        error = (value.cpu().double() - truth).abs()
        assert (error <= bound).all(), f"{error.max():.2e}: {error} above {bound}"


def check_gradients(place: Place) -> None:
    """Gradients of each and both outputs, for several temperatures and scratch sizes."""
    cases = [(3, 1.0, scratch) for scratch in SCRATCHES]
    cases += [(1, 0.7, None), (2, 1.3, 1_500), (3, 0.7, None)]
    values = given(23, VOCAB, 40)
    for wanted, temperature, scratch in cases:
        options = {"temperature": temperature, "wanted": wanted}
        got = run(place, *values, scratch_bytes=scratch, **options)
        expected = reference(*values, **options)
        rows = place.rows(VOCAB)
        mine_VD = expected[3][rows]
        for left, right in zip(got[:3], expected, strict=False):
            close(left, right, 5e-6)
        close(got[3][: len(mine_VD)], mine_VD, 5e-6)
        assert not got[3][len(mine_VD) :].any(), "padding rows have a gradient"
        assert not got[2][::5].any(), "ignored tokens have a gradient"


def check_narrow_inputs(place: Place) -> None:
    """bfloat16 outputs equal those of widened inputs; gradients have bfloat16 precision."""
    values = given(21, VOCAB, 32, dtype=torch.bfloat16)
    got, expected = run(place, *values), reference(*values)
    assert got[0].dtype == torch.float32 and got[3].dtype == torch.bfloat16
    check_outputs(got[:2], expected[:2])
    close(got[2], expected[2], 1e-2)
    mine_VD = expected[3][place.rows(VOCAB)]
    close(got[3][: len(mine_VD)], mine_VD, 1e-2)


def check_nan_is_passed_on(place: Place) -> None:
    """A NaN propagates to the outputs and gradient of its token and raises no error."""
    hidden_ND, weight_VD, target_N, grads_2N = given(6, VOCAB, 16)
    hidden_ND[2, 3] = torch.nan
    logp_N, entropy_N, grad_hidden_ND, _ = run(place, hidden_ND, weight_VD, target_N, grads_2N)
    assert logp_N.isnan().tolist() == entropy_N.isnan().tolist() == [i == 2 for i in range(6)]
    assert grad_hidden_ND[2].isnan().all()


def check_no_tokens(place: Place) -> None:
    got = run(place, *given(0, VOCAB, 16))
    assert [value.numel() for value in got[:3]] == [0, 0, 0]
    assert not got[3].any()


def check_empty_shard(place: Place) -> None:
    """The last rank may hold only padding rows."""
    values = given(9, 2, 16)
    got, expected = run(place, *values), reference(*values)
    check_outputs(got[:2], expected[:2])
    close(got[2], expected[2], 1e-5)


CHECKS = (
    check_accuracy,
    check_gradients,
    check_narrow_inputs,
    check_nan_is_passed_on,
    check_no_tokens,
    check_empty_shard,
)
