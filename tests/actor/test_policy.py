from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.policy_loss import aggregate, clipped

LAYOUTS = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
}


def torch_scores(model, batch, temperature):
    """[B, T] log-prob and entropy with transformers, one unpadded row at a time."""
    logp_BT = torch.zeros(batch.response_BT.shape)
    entropy_BT = torch.zeros(batch.response_BT.shape)
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(batch.length_B[row])
        response = batch.response_BT[row, :length]
        tokens = torch.cat([torch.tensor(prompt), response])
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        logp_TV = logits.log_softmax(-1)
        logp_BT[row, :length] = logp_TV.gather(1, response[:, None]).squeeze(1)
        entropy_BT[row, :length] = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_BT, entropy_BT


def torch_loss(config, batch, logp_BT, entropy_BT):
    loss_BT, _ = clipped(
        logp_BT,
        batch.old_logp_BT,
        batch.advantage_BT,
        batch.mask_BT,
        clip_low=config.algo.clip_low,
        clip_high=config.algo.clip_high,
        clip_dual=config.algo.clip_dual,
    )
    loss_BT = loss_BT + config.algo.kl_coef * kl_penalty(logp_BT, batch.ref_logp_BT, "k3")
    loss_BT = loss_BT - config.algo.entropy_coef * entropy_BT
    return aggregate(loss_BT, batch.mask_BT, str(config.algo.aggregation))


def assemble(results, call, shapes):
    """Full tensors from every rank's blocks; replicas must agree."""
    whole = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for rank in results:
        for name, rect, value in rank[call]:
            seen = whole[name][rect.slices]
            known = ~seen.isnan()
            torch.testing.assert_close(value[known], seen[known], rtol=0, atol=1e-6)
            whole[name][rect.slices] = value
    return whole


def merged(results, call, batch):
    """[B, T] log-probs and entropies from the ranks that answered; every row once."""
    logp_BT, entropy_BT = torch.full((2, *batch.response_BT.shape), math.nan)
    seen = []
    for rank in results:
        if rank[call] is not None:
            rows, logp, entropy = rank[call]
            logp_BT[rows], entropy_BT[rows] = logp, entropy
            seen += rows
    assert sorted(seen) == list(range(batch.num_rows))
    return logp_BT, entropy_BT


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_scores_and_learns_like_transformers(
    layout, tied, checkpoints, batch, train_config, run_ranks
):
    config = train_config(checkpoints[tied], **layout)
    config.rollout.temperature = 0.7
    config.algo.kl_coef, config.algo.entropy_coef = 0.1, 0.05
    results = run_ranks(
        config,
        [
            ("load", str(checkpoints[tied])),
            ("logprobs", batch, False),
            ("update", batch, None, 1e-3),
            ("gradients",),
            ("logprobs", batch, True),
        ],
    )
    model = Qwen3ForCausalLM.from_pretrained(checkpoints[tied], dtype=torch.float32)
    logp_BT, entropy_BT = torch_scores(model, batch, 0.7)
    got_logp_BT, got_entropy_BT = merged(results, 1, batch)
    torch.testing.assert_close(got_logp_BT, logp_BT, rtol=0, atol=1e-4)
    torch.testing.assert_close(got_entropy_BT, entropy_BT, rtol=0, atol=1e-4)

    loss = torch_loss(config, batch, logp_BT, entropy_BT)
    loss.backward()
    gradient = {name: value.grad for name, value in model.named_parameters()}
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))
    clip = min(1.0, config.optim.grad_clip / (norm + 1e-6))
    for stats in (rank[2] for rank in results):
        assert stats.loss == pytest.approx(loss.item(), abs=1e-4)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
        assert stats.num_tokens == int(batch.mask_BT.sum())
        assert stats.num_skipped == 0
    shapes = {name: value.shape for name, value in gradient.items()}
    for name, value in assemble(results, 3, shapes).items():
        torch.testing.assert_close(value, gradient[name] * clip, rtol=1e-3, atol=1e-5, msg=name)

    reference_BT, _ = merged(results, 4, batch)
    torch.testing.assert_close(reference_BT, got_logp_BT, rtol=0, atol=1e-6)


def test_an_update_moves_the_weights_like_adamw(checkpoints, batch, train_config, run_ranks):
    config = train_config(checkpoints[True], tensor=2)
    config.optim.weight_decay = 0.1
    calls = [("load", str(checkpoints[True])), ("supervise", batch, 1e-2), ("weights",)]
    results = run_ranks(config, calls)
    model = Qwen3ForCausalLM.from_pretrained(checkpoints[True], dtype=torch.float32)
    logp_BT, _ = torch_scores(model, batch, 1.0)
    (-logp_BT[batch.mask_BT].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
    matrices = [value for value in model.parameters() if value.ndim > 1]
    vectors = [value for value in model.parameters() if value.ndim == 1]
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
    ).step()
    expected = dict(model.named_parameters())
    got = assemble(results, 2, {name: value.shape for name, value in expected.items()})
    for name, value in got.items():
        # Adam divides by the gradient's own size: where that is near 0 the step is noise.
        far = (value - expected[name]).abs() > 1e-4
        assert far.float().mean() < 0.01, name
    assert results[0][1].loss == pytest.approx(-logp_BT[batch.mask_BT].mean().item(), abs=1e-4)


def test_supervision_lowers_the_loss_alike_on_one_and_four_ranks(
    checkpoints, batch, train_config, run_ranks
):
    calls = [("load", str(checkpoints[True]))] + [("supervise", batch, 1e-2)] * 4
    losses = []
    for layout in ({}, {"tensor": 2, "data": 2}):
        results = run_ranks(train_config(checkpoints[True], **layout), calls)
        losses.append([stats.loss for stats in results[-1][1:]])
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_minibatches_take_several_steps_and_count_each_token_once(
    checkpoints, batch, train_config, run_ranks
):
    config = train_config(checkpoints[True])
    config.optim.num_minibatches = 3
    (results,) = run_ranks(
        config,
        [
            ("load", str(checkpoints[True])),
            ("update", batch, None, 0.0),
            ("update", batch, None, 0.1),
        ],
    )
    assert results[1].num_tokens == int(batch.mask_BT.sum())
    assert results[2].loss != pytest.approx(results[1].loss)


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(
    checkpoints, batch, train_config, run_ranks
):
    advantage_BT = batch.advantage_BT.clone()
    advantage_BT[0, batch.mask_BT[0].nonzero()[0, 0]] = math.inf
    bad = batch.with_fields(advantage_BT=advantage_BT)
    config = train_config(checkpoints[True], tensor=2, data=2)
    calls = [
        ("load", str(checkpoints[True])),
        ("weights",),
        ("update", bad, None, 0.1),
        ("weights",),
        ("update", batch, None, 0.1),
        ("weights",),
    ]
    for rank in run_ranks(config, calls):
        assert rank[2].num_skipped == 1
        assert rank[4].num_skipped == 0
        for (_, _, before), (_, _, after), (_, _, later) in zip(*rank[1::2], strict=True):
            assert torch.equal(before, after)
            assert not torch.equal(after, later)


def test_more_data_ranks_than_trained_rows_is_the_same_step(
    checkpoints, batch, train_config, run_ranks
):
    one = batch.select([1])
    calls = [("load", str(checkpoints[True])), ("supervise", one, 1e-2), ("logprobs", one, False)]
    (alone,) = run_ranks(train_config(checkpoints[True]), calls)
    both = run_ranks(train_config(checkpoints[True], data=2), calls)
    for rank in both:
        assert rank[1].loss == pytest.approx(alone[1].loss, abs=1e-5)
        assert rank[1].grad_norm == pytest.approx(alone[1].grad_norm, rel=1e-4)
    logp_BT, _ = merged(both, 2, one)
    torch.testing.assert_close(logp_BT, alone[2][1], rtol=0, atol=1e-4)


def test_a_weight_per_token_replaces_the_kl_coefficient(
    checkpoints, batch, train_config, run_ranks
):
    weight_BT = torch.full(batch.mask_BT.shape, 0.3)
    config = train_config(checkpoints[True])
    by_token = run_ranks(
        config, [("load", str(checkpoints[True])), ("update", batch, weight_BT, 0.0)]
    )
    config = dataclasses.replace(config)
    config.algo.kl_coef = 0.3
    by_config = run_ranks(config, [("load", str(checkpoints[True])), ("update", batch, None, 0.0)])
    assert by_token[0][1].loss == pytest.approx(by_config[0][1].loss, abs=1e-6)
    assert by_token[0][1].metrics["ref_kl"] > 0


def test_an_export_loads_in_transformers_with_the_same_logits(
    checkpoints, batch, train_config, run_ranks, tmp_path
):
    for tied, layout in ((True, {"tensor": 2, "pipeline": 2}), (False, {"tensor": 2})):
        target = tmp_path / f"export-{tied}"
        results = run_ranks(
            train_config(checkpoints[tied], **layout),
            [
                ("load", str(checkpoints[tied])),
                ("supervise", batch, 1e-2),
                ("logprobs", batch, False),
                ("export", str(target)),
            ],
        )
        model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
        with torch.no_grad():
            expected_BT, _ = torch_scores(model, batch, 1.0)
        got_BT, _ = merged(results, 2, batch)
        torch.testing.assert_close(got_BT, expected_BT, rtol=0, atol=1e-4)
        assert (target / "tokenizer.json").is_file()
        assert not target.with_name(f"{target.name}.partial").exists()
