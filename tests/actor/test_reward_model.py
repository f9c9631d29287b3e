"""Scores in every layout against transformers' sequence classifiers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mega_agentrl.actor.reward_model import RewardModelRank
from mega_agentrl.errors import InputError
from tests.actor.circles import mark_extended
from tests.actor.role_jobs import run_role
from tests.tiny_models import REWARDS, make_tiny_model

LAYOUTS = {
    "one": {},
    "TP2": {"tensor": 2},
    "TP2 SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2},
    "PP2 VP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
    "CP2": {"context": 2},
}


@pytest.fixture(scope="module")
def judged(request, tmp_path_factory, batch):
    """Return (folder, transformers' scores, batch with one empty response)."""
    import transformers

    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("reward"))
    length_B = batch.length_B.clone()
    mask_BT = batch.mask_BT.clone()
    length_B[4], mask_BT[4] = 0, False
    batch = batch.with_fields(length_B=length_B, mask_BT=mask_BT)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = zip(batch.prompt_ids, batch.response_BT, length_B.tolist(), strict=True)
    with torch.no_grad():
        scores = [
            model(torch.tensor([[*prompt, *response[:length].tolist()]])).logits.item()
            for prompt, response, length in rows
        ]
    return str(folder), torch.tensor(scores), batch


@pytest.mark.parametrize(
    ("judged", "layout"),
    mark_extended(
        product(REWARDS, LAYOUTS),
        quick=[
            ("llama_reward", "TP2 SP"),
            ("qwen2_reward", "PP2 VP2"),
            ("qwen3_reward", "DP2"),
            ("qwen3_reward", "CP2"),
        ],
    ),
    indirect=["judged"],
)
def test_scores_are_those_of_transformers(layout, judged, rank_pool, train_config):
    folder, expected_B, batch = judged
    config = train_config(folder, **LAYOUTS[layout])
    ranks = rank_pool.run(
        run_role, config.parallel.world_size, "reward", config, [("compute_scores", batch)]
    )
    shares = [answer for (answer,) in ranks if answer is not None]
    assert len(shares) == config.parallel.data
    rows = [row for share_rows, _ in shares for row in share_rows]
    assert sorted(rows) == list(range(batch.num_rows))
    got_B = torch.cat([score_B for _, score_B in shares])
    torch.testing.assert_close(got_B, expected_B[rows], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("judged", REWARDS, indirect=True)
def test_neither_padding_nor_the_token_after_a_row_is_read(judged, rank_pool, train_config):
    folder, expected_B, batch = judged
    past_BT = torch.arange(batch.response_BT.size(1))[None, :] >= batch.length_B[:, None]
    dirty = batch.with_fields(response_BT=batch.response_BT.masked_fill(past_BT, 60))
    (((rows, got_B),),) = rank_pool.run(
        run_role, 1, "reward", train_config(folder), [("compute_scores", dirty)]
    )
    torch.testing.assert_close(got_B, expected_B[rows], atol=1e-4, rtol=0.0)


def test_a_policy_is_no_reward_model(tmp_path, train_config, lone_rank):
    folder = str(make_tiny_model("qwen3", tmp_path / "policy"))
    with pytest.raises(InputError) as caught:
        RewardModelRank(train_config(folder), lone_rank, model_path=folder)
    assert caught.value.got == "Qwen3ForCausalLM"


def test_a_reward_model_has_no_training_state_and_needs_its_head(tmp_path, train_config, lone_rank):
    folder = str(make_tiny_model("qwen3_reward", tmp_path / "reward"))
    bare = make_tiny_model("qwen3_reward", tmp_path / "bare")
    drop_head(bare / "model.safetensors")
    reward = RewardModelRank(train_config(folder), lone_rank, model_path=folder)
    try:
        assert not any(weight.requires_grad for weight in reward.megatron_model.parameters.values())
        assert all(not chunk.buffers for chunk in reward.megatron_model.chunks)
        with pytest.raises(AssertionError):
            _ = reward.megatron_model.optimizer
        with pytest.raises(InputError) as caught:
            reward.load_hf(str(bare))
        assert caught.value.got["missing tensors"] == ["score.weight"]
    finally:
        reward.close()


def drop_head(file):
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    del tensors["score.weight"]
    save_file(tensors, file)
