"""A function of the user's own gives the advantages; a wrong one is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.train.advantages import add_advantages
from mega_agentrl.train.user_advantage import load_user_advantage
from mega_agentrl.types.batch import TrainBatch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_algorithm.py"


@pytest.fixture
def own(tmp_path):
    def own(body, name="mine"):
        file = tmp_path / f"{name}.py"
        file.write_text(f"import torch\n\n\ndef advantage(batch, algo):\n    return {body}\n")
        return AlgoConfig(advantage=f"{file}:advantage")

    return own


def test_what_it_returns_is_the_advantage_of_trained_tokens(own, small_batch):
    algo = own("batch.reward_B[:, None] + torch.zeros_like(batch.rollout_logp_BT)")
    batch, metrics = add_advantages(small_batch, algo, kl_coef=0.0, cot_marker_ids=None)
    expected = small_batch.reward_B[:, None] * small_batch.mask_BT
    assert torch.equal(batch.advantage_BT, expected)
    trained = small_batch.mask_BT
    assert metrics["advantage/abs_mean"] == pytest.approx(float(expected.abs()[trained].mean()))


def test_nothing_beside_the_mask_matters(own, small_batch):
    algo = own("torch.where(batch.mask_BT, 1.0, torch.nan)")
    batch, _ = add_advantages(small_batch, algo, kl_coef=0.0, cot_marker_ids=None)
    assert torch.equal(batch.advantage_BT, small_batch.mask_BT.float())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("batch.reward_B", r"returned \(4,\), expected a tensor of shape \(4, 3\); .*whole traj"),
        ("3", r"returned int, expected a tensor of shape \(4, 3\)"),
        ("batch.mask_BT / 0", "returned 9 numbers that are not finite"),
    ],
)
def test_a_wrong_result_is_named(own, small_batch, body, said):
    with pytest.raises(ValueError, match=rf"algo\.advantage=.*mine\.py:advantage: {said}"):
        add_advantages(small_batch, own(body), kl_coef=0.0, cot_marker_ids=None)


def test_a_wrong_function_is_named_before_it_is_called(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("advantage = 3\n\n\ndef other(batch):\n    pass\n")
    with pytest.raises(ValueError, match="got 3 for advantage, expected a function of"):
        load_user_advantage(str(file))
    with pytest.raises(ValueError, match=r"got other\(batch\), expected a function of"):
        load_user_advantage(f"{file}:other")


def test_the_example(small_batch):
    """Rewards 1, 0 | 3, 5 are half a point and one from their medians; entropies .25."""
    batch = replace(small_batch, entropy_BT=torch.full_like(small_batch.rollout_logp_BT, 0.25))
    algo = AlgoConfig(advantage=str(EXAMPLE))
    batch, _ = add_advantages(batch, algo, kl_coef=0.0, cot_marker_ids=None)
    expected = torch.tensor([0.5, -0.5, -1.0, 1.0])[:, None] * 1.25 * small_batch.mask_BT
    torch.testing.assert_close(batch.advantage_BT, expected)


@pytest.fixture
def small_batch():
    grid = torch.zeros(4, 3)
    return TrainBatch(
        prompt_ids=((1,),) * 4,
        response_BT=grid.long(),
        length_B=torch.full((4,), 3),
        mask_BT=torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool),
        group_B=torch.tensor([0, 0, 1, 1]),
        reward_B=torch.tensor([1.0, 0.0, 3.0, 5.0]),
        node_BT=torch.arange(12).view(4, 3),
        rollout_logp_BT=grid,
        rollout_entropy_BT=grid,
        version_BT=grid.long(),
    )
