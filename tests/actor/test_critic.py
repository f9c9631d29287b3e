"""The critic in every layout against transformers' body, torch's autograd and torch's Adam."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from mega_agentrl.actor.critic import CriticRank, ValueObjective
from mega_agentrl.algo.policy_loss import AGGREGATION_MODES, aggregate, loss_denominator
from mega_agentrl.algo.value_loss import clipped_value_loss
from mega_agentrl.batch.packed_rows import CRITIC_TARGETS
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_mapping import HF_SCORE_HEAD, hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.actor.circles import mark_extended
from tests.actor.role_jobs import run_role
from tests.parallel.merge import assemble, relative_errors
from tests.rank_shards import pack_rows, targets_of
from tests.tiny_models import REWARDS, make_tiny_model
from tests.train_batches import select_rows

CLIP = 0.5
LAYOUTS = {
    "one": {},
    "TP2": {"tensor": 2},
    "TP2 SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2},
    "PP2 VP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
    "DP2 plain": {"data": 2, "distributed_optimizer": False},
    "CP2": {"context": 2},
}


def select(batch):
    return torch.arange(batch.response_BT.size(1))[None, :] < batch.length_B[:, None]


def reference_values(model, batch):
    """Return `[B, T]` values with gradients, from a transformers classifier at every token."""
    rows = []
    for prompt, response, length in zip(
        batch.prompt_ids, batch.response_BT, batch.length_B.tolist(), strict=True
    ):
        tokens = torch.tensor([[*prompt, *response[:length].tolist()]])
        hidden_SD = model.model(input_ids=tokens).last_hidden_state[0]
        value_S = model.score(hidden_SD).squeeze(1)
        value_T = value_S[len(prompt) - 1 : len(prompt) - 1 + length]
        rows.append(torch.nn.functional.pad(value_T, (0, batch.response_BT.size(1) - length)))
    return torch.stack(rows)


class ReferenceCritic:
    """A checkpoint with a head, a batch around its values, and single-process results."""

    def __init__(self, name, folder, batch):
        import transformers

        self.folder = str(make_tiny_model(name, folder))
        auto = transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(self.folder, dtype=torch.float32).eval()
        value_BT = reference_values(model, batch)
        generator = torch.Generator().manual_seed(11)
        noise, distance = torch.randn(2, *value_BT.shape, generator=generator)
        # Old values around the present ones, so that the clip decides some and spares others.
        self.batch = batch.with_fields(
            value_BT=value_BT.detach() + CLIP * noise, return_BT=value_BT.detach() + 2 * distance
        )
        self.value_BT = value_BT.detach()
        loss_BT, self.info = clipped_value_loss(
            value_BT, self.batch.value_BT, self.batch.return_BT, batch.mask_BT, clip=CLIP
        )
        loss = aggregate(loss_BT, batch.mask_BT, "token_mean")
        loss.backward()
        self.loss = loss.item()
        self.gradients = {name: weight.grad for name, weight in model.named_parameters()}
        self.grad_norm = math.sqrt(sum(float(g.square().sum()) for g in self.gradients.values()))


@pytest.fixture(scope="module")
def known(request, tmp_path_factory, batch):
    return ReferenceCritic(request.param, tmp_path_factory.mktemp("critic"), batch)


def config_of(train_config, folder, layout):
    config = train_config(str(folder), **layout)
    config.optim.grad_clip = 1e9
    return config


def merged_values(answers, batch):
    value_BT, seen = torch.full(batch.response_BT.shape, math.nan), []
    for answer in answers:
        if answer is not None:
            rows, value_BT[answer[0]] = answer
            seen += rows
    assert sorted(seen) == list(range(batch.num_rows))
    return value_BT


@pytest.mark.parametrize(
    ("known", "layout"),
    mark_extended(
        product(REWARDS, LAYOUTS),
        quick=[
            ("llama_reward", "TP2"),
            ("llama_reward", "CP2"),
            ("qwen2_reward", "PP2 VP2"),
            ("qwen2_reward", "DP2"),
            ("qwen3_reward", "one"),
            ("qwen3_reward", "TP2 SP"),
        ],
    ),
    indirect=["known"],
)
def test_values_loss_and_gradients_are_those_of_one_process(layout, known, rank_pool, train_config):
    batch, config = known.batch, config_of(train_config, known.folder, LAYOUTS[layout])
    calls = [("compute_values", batch), ("traced_update", batch, 0.0)]
    ranks = rank_pool.run(run_role, config.parallel.world_size, "critic", config, calls)
    got_BT = merged_values([values for values, _ in ranks], batch)
    torch.testing.assert_close(got_BT, known.value_BT, atol=1e-4, rtol=0.0)
    assert got_BT[~select(batch)].abs().max() == 0
    for _, (stats, _) in ranks:
        assert stats.loss == pytest.approx(known.loss, rel=1e-5)
        assert stats.grad_norm == pytest.approx(known.grad_norm, rel=1e-4)
        check_metrics(stats, known)
    shapes = hf_shapes(ModelShape.from_folder(known.folder))
    got = assemble([steps[0] for _, (_, steps) in ranks], shapes, atol=1e-5 * known.grad_norm)
    errors = relative_errors(got, known.gradients)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


def check_metrics(stats, known):
    batch = known.batch
    mask_BT = batch.mask_BT
    assert 0.05 < known.info["value_clipfrac"] < 0.95
    assert stats.num_tokens == mask_BT.sum()
    assert stats.metrics == pytest.approx(
        {
            "value_loss": known.loss,
            "value_clipfrac": known.info["value_clipfrac"].item(),
            "value": known.value_BT[mask_BT].mean().item(),
            "return": batch.return_BT[mask_BT].mean().item(),
        },
        rel=1e-4,
        abs=1e-4,
    )


def test_two_steps_of_adam_are_those_of_torch(rank_pool, train_config, batch, tmp_path):
    """A later step uses the moments and weights of an earlier one."""
    import transformers

    known = ReferenceCritic("qwen3_reward", tmp_path / "model", batch)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(known.folder, dtype=torch.float32)
    matrices, vectors = (
        [weight for weight in model.parameters() if (weight.ndim > 1) is wide]
        for wide in (True, False)
    )
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
    )
    for rows in (slice(0, 3), slice(3, 6)):
        part = select_rows(known.batch, range(6)[rows])
        loss_BT, _ = clipped_value_loss(
            reference_values(model, part), part.value_BT, part.return_BT, part.mask_BT, clip=CLIP
        )
        adam.zero_grad()
        aggregate(loss_BT, part.mask_BT, "token_mean").backward()
        adam.step()
    expected_BT = reference_values(model, batch).detach()
    assert (expected_BT - known.value_BT).abs().max() > 0.1
    for layout in ({"tensor": 2, "sequence_parallel": True}, {"data": 2}):
        config = config_of(train_config, known.folder, layout)
        config.optim.num_minibatches = 2
        calls = [("update", known.batch, 1e-2), ("compute_values", batch)]
        ranks = rank_pool.run(run_role, config.parallel.world_size, "critic", config, calls)
        got_BT = merged_values([values for _, values in ranks], batch)
        torch.testing.assert_close(got_BT, expected_BT, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("qwen3", [{}, {"pipeline": 2}]),
        pytest.param(
            "qwen3_moe",
            [{}, {"tensor": 2, "sequence_parallel": True, "expert": 2}],
            marks=pytest.mark.extended,
        ),
    ],
    ids=["qwen3", "qwen3_moe"],
)
def test_a_policys_body_starts_with_values_of_zero(
    name, layouts, rank_pool, train_config, tmp_path, batch
):
    folder = make_tiny_model(name, tmp_path / name, tied=True)
    shapes = hf_shapes(ModelShape.from_folder(folder).with_scalar_head())
    batch = batch.with_fields(
        value_BT=torch.zeros(batch.response_BT.shape),
        return_BT=torch.where(batch.mask_BT, 1.0, 0.0) * torch.arange(1, 7)[:, None],
    )
    learned = []
    for layout in layouts:
        config = config_of(train_config, folder, layout)
        values = ("compute_values", batch)
        calls = [values, ("weights",), ("update", batch, 1e-3), values]
        ranks = rank_pool.run(run_role, config.parallel.world_size, "critic", config, calls)
        assert merged_values([rank[0] for rank in ranks], batch).abs().max() == 0
        held = assemble([rank[1] for rank in ranks], shapes, atol=0.0)
        assert held[HF_SCORE_HEAD].abs().max() == 0
        check_body(held, folder)
        learned.append(merged_values([rank[3] for rank in ranks], batch))
    # All returns are positive, and the step is the same under all parallel sizes.
    assert learned[0][batch.mask_BT].mean() > 1e-3
    for value_BT in learned[1:]:
        torch.testing.assert_close(value_BT, learned[0], atol=1e-4, rtol=0.0)


def check_body(held, folder):
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    body = {name: value for name, value in held.items() if name != HF_SCORE_HEAD}
    assert set(body) == set(saved) - {"lm_head.weight"}
    assert all(torch.equal(value, saved[name]) for name, value in body.items())


def test_a_checkpoint_of_another_body_is_refused(tmp_path, train_config, lone_rank):
    folder = make_tiny_model("qwen3", tmp_path / "four")
    other = make_tiny_model("qwen3", tmp_path / "two", num_hidden_layers=2)
    critic = CriticRank(train_config(str(folder)), lone_rank, model_path=str(folder))
    try:
        with pytest.raises(InputError) as caught:
            critic.load_hf(str(other))
        assert caught.value.name == f"shape of {other}"
        critic.load_hf(str(make_tiny_model("qwen3_reward", tmp_path / "scored")))
        assert critic.megatron_model.parameters["output_layer.weight"].abs().max() > 0
        critic.load_hf(str(folder))
        assert critic.megatron_model.parameters["output_layer.weight"].abs().max() == 0
    finally:
        critic.close()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_stats_add_up_for_any_split_of_the_rows(mode, batch):
    generator = torch.Generator().manual_seed(1)
    value, old, target = torch.randn(3, *batch.response_BT.shape, generator=generator)
    batch = batch.with_fields(value_BT=old, return_BT=target)
    denominator = loss_denominator(batch.mask_BT, mode, max_response_tokens=9).item()
    objective = ValueObjective(targets_of(batch, CRITIC_TARGETS), denominator, CLIP, mode)
    micros = [
        [pack_rows(batch, rows, batch.mask_BT, torch.device("cpu")) for rows in cut]
        for cut in ([range(6)], [[2, 4], [], [0, 1, 3, 5]])
    ]
    whole, parts = (
        [objective(micro, value[list(micro.rows)])[1] for micro in cut] for cut in micros
    )
    loss_BT, _ = clipped_value_loss(value, old, target, batch.mask_BT, clip=CLIP)
    want = aggregate(loss_BT, batch.mask_BT, mode, denominator=denominator)
    torch.testing.assert_close(whole[0]["loss"], want)
    for name, total in whole[0].items():
        torch.testing.assert_close(sum(part[name] for part in parts), total)


def test_an_update_without_values_is_refused(batch):
    with pytest.raises(InputError) as caught:
        ValueObjective(targets_of(batch, CRITIC_TARGETS), 1.0, CLIP, "token_mean")
    assert caught.value.got == ["value_BT", "return_BT"]
