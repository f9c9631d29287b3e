from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.policy_loss import aggregate, clipped

LAYOUTS = {
    "one": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
    "TP2-PP2": {"tensor": 2, "pipeline": 2},
}


class Jobs:
    """Every job of this file, run once per number of ranks when first asked for."""

    def __init__(self, run_ranks, checkpoints, batch, train_config, folder):
        self._run_ranks = run_ranks
        self._checkpoints = checkpoints
        self._train_config = train_config
        self._batch = batch
        self._done = {}
        self.jobs = {}
        self.folder = folder
        self._add_scoring()
        self._add_training()

    def _add(self, name, layout, calls, *, tied=True, **algo):
        config = self._train_config(self._checkpoints[tied], **layout)
        for key, value in algo.items():
            section, _, leaf = key.partition("__")
            setattr(getattr(config, section), leaf, value)
        self.jobs[name] = (config, [("load", str(self._checkpoints[tied])), *calls])

    def _add_scoring(self):
        calls = [
            ("logprobs", self._batch, False),
            ("update", self._batch, None, 1e-3),
            ("gradients",),
            ("logprobs", self._batch, True),
        ]
        for name, layout in LAYOUTS.items():
            for tied in (False, True):
                self._add(
                    f"{name} tied={tied}",
                    layout,
                    calls,
                    tied=tied,
                    rollout__temperature=0.7,
                    algo__kl_coef=0.1,
                    algo__entropy_coef=0.05,
                )

    def _add_training(self):
        batch, one = self._batch, self._batch.select([1])
        advantage_BT = batch.advantage_BT.clone()
        advantage_BT[0, batch.mask_BT[0].nonzero()[0, 0]] = math.inf
        bad = batch.with_fields(advantage_BT=advantage_BT)
        weight_BT = torch.full(batch.mask_BT.shape, 0.3)
        step = ("supervise", batch, 1e-2)
        adam = [step, ("weights",)]
        self._add("adam", {"tensor": 2}, adam, optim__weight_decay=0.1)
        self._add("steps one", {}, [step] * 4)
        self._add("steps TP2-DP2", {"tensor": 2, "data": 2}, [step] * 4)
        updates = [("update", batch, None, 0.0), ("update", batch, None, 0.1)]
        self._add("minibatches", {}, updates, optim__num_minibatches=3)
        self._add("kl by token", {}, [("update", batch, weight_BT, 0.0)])
        self._add("kl by config", {}, [("update", batch, None, 0.0)], algo__kl_coef=0.3)
        few = [("supervise", one, 1e-2), ("logprobs", one, False)]
        self._add("few one", {}, few)
        self._add("few DP2", {"data": 2}, few)
        not_finite = [
            ("weights",),
            ("update", bad, None, 0.1),
            ("weights",),
            ("update", batch, None, 0.1),
            ("weights",),
        ]
        self._add("not finite", {"tensor": 2, "data": 2}, not_finite)
        for tied, layout in ((True, {"tensor": 2, "pipeline": 2}), (False, {"tensor": 2})):
            target = str(self.folder / f"export-{tied}")
            calls = [step, ("logprobs", batch, False), ("export", target)]
            self._add(f"export tied={tied}", layout, calls, tied=tied)
        restart = [step, ("reset_optimizer",), ("load", str(self._checkpoints[True])), step, step]
        self._add("restart", {}, restart)

    def __getitem__(self, name):
        def ranks(job):
            layout = self.jobs[job][0].parallel
            return layout.tensor * layout.pipeline * layout.data

        if name not in self._done:
            same = {job: self.jobs[job] for job in self.jobs if ranks(job) == ranks(name)}
            self._done |= self._run_ranks(same)
        return self._done[name]


@pytest.fixture(scope="module")
def jobs(run_ranks, checkpoints, batch, train_config, tmp_path_factory):
    return Jobs(run_ranks, checkpoints, batch, train_config, tmp_path_factory.mktemp("exports"))


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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_scores_and_learns_like_transformers(layout, tied, jobs, checkpoints, batch):
    name = f"{layout} tied={tied}"
    results, config = jobs[name], jobs.jobs[name][0]
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
        torch.testing.assert_close(value, gradient[name] * clip, rtol=1e-3, atol=1e-4)

    # The update has moved the weights; the reference still scores as before.
    reference_BT, _ = merged(results, 4, batch)
    torch.testing.assert_close(reference_BT, got_logp_BT, rtol=0, atol=1e-6)


def test_a_step_moves_the_weights_like_adamw(jobs, checkpoints, batch):
    results, config = jobs["adam"], jobs.jobs["adam"][0]
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


def test_supervision_lowers_the_loss_alike_on_one_and_four_ranks(jobs):
    losses = [
        [stats.loss for stats in jobs[name][-1][1:]] for name in ("steps one", "steps TP2-DP2")
    ]
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_minibatches_take_several_steps_and_count_each_token_once(jobs, batch):
    ((_, still, moving),) = jobs["minibatches"]
    assert still.num_tokens == moving.num_tokens == int(batch.mask_BT.sum())
    assert moving.loss != pytest.approx(still.loss)


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(jobs):
    for rank in jobs["not finite"]:
        assert rank[2].num_skipped == 1
        assert rank[4].num_skipped == 0
        for (_, _, before), (_, _, after), (_, _, later) in zip(*rank[1::2], strict=True):
            assert torch.equal(before, after)
            assert not torch.equal(after, later)


def test_more_data_ranks_than_rows_take_the_same_step(jobs, batch):
    (alone,), both = jobs["few one"], jobs["few DP2"]
    for rank in both:
        assert rank[1].loss == pytest.approx(alone[1].loss, abs=1e-5)
        assert rank[1].grad_norm == pytest.approx(alone[1].grad_norm, rel=1e-4)
    logp_BT, _ = merged(both, 2, batch.select([1]))
    torch.testing.assert_close(logp_BT, alone[2][1], rtol=0, atol=1e-4)


def test_a_weight_per_token_replaces_the_kl_coefficient(jobs):
    by_token, by_config = jobs["kl by token"][0][1], jobs["kl by config"][0][1]
    assert by_token.loss == pytest.approx(by_config.loss, abs=1e-6)
    assert by_token.metrics["ref_kl"] > 0


def test_a_fresh_optimizer_repeats_the_first_step(jobs):
    _, first, _, _, again, _ = jobs["restart"][0]
    once = jobs["steps one"][0]
    assert again.loss == pytest.approx(first.loss, abs=1e-6)
    assert jobs["restart"][0][5].loss == pytest.approx(once[2].loss, abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_in_transformers_with_the_same_logits(tied, jobs, batch):
    results = jobs[f"export tied={tied}"]
    target = jobs.folder / f"export-{tied}"
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        expected_BT, _ = torch_scores(model, batch, 1.0)
    got_BT, _ = merged(results, 2, batch)
    torch.testing.assert_close(got_BT, expected_BT, rtol=0, atol=1e-4)
    assert (target / "tokenizer.json").is_file()
    assert not target.with_name(f"{target.name}.partial").exists()


def test_a_job_of_another_size_or_shape_is_refused(checkpoints, train_config):
    config = train_config(checkpoints[True], tensor=4)
    with pytest.raises(ValueError, match=r"parallel\.tensor=4.*num_key_value_heads is 2"):
        PolicyRank(config, rank=0, world_size=4, master_address="", master_port=0, timeout_s=1.0)
