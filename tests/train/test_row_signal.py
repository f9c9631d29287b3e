"""Rows without signal: what has no advantage is neither scored nor trained on."""

import pytest
import torch

from mega_agentrl.config.algorithm_traits import ESTIMATORS, LOSSES
from mega_agentrl.config.enums import AresMode, KlPlacement
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from mega_agentrl.train.advantages import mismatch_metrics
from mega_agentrl.train.row_signal import rows_to_score, rows_with_signal
from tests.train.test_advantages import advantages, batch, select_rows
from tests.tree_batches import FORKED_TREES, make_tree_batch

ZERO_IF_EQUAL = [
    name
    for name in ESTIMATORS.registered()
    if AlgoConfig(advantage=name).estimator.equal_rewards_give_zero
]


def test_only_rows_with_an_advantage_on_a_trained_token_have_signal():
    advantage_BT = torch.tensor([[0.0, 0.0], [0.0, -1e-30], [2.0, 0.0], [0.0, 3.0]])
    given = batch(advantage_BT=advantage_BT)  # the last token of row 3 is not trained on
    assert rows_with_signal(given, AlgoConfig()).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_coef": 0.01},
        {"kl_coef": 0.1},
        {"ares": AresConfig(mode=AresMode.released)},
    ],
    ids=["entropy bonus", "KL term", "KL weights of ARES"],
)
def test_all_rows_count_where_the_loss_has_another_term(changes):
    given = batch(advantage_BT=torch.zeros(4, 2))
    assert rows_with_signal(given, AlgoConfig(**changes)) is None
    assert rows_to_score(given, AlgoConfig(**changes)) is None


def test_a_loss_of_ones_own_is_left_out_only_if_it_says_so(tmp_path):
    source = """
from mega_agentrl.actor.training.losses import register_loss

@register_loss("margin", metrics=(){trait})
def loss(logp_BT, old_logp_BT, advantage_BT, mask_BT):
    return (1 - advantage_BT) * logp_BT, {{}}
"""
    given = batch(advantage_BT=torch.zeros(4, 2))
    for name, trait, expected in [
        ("silent", "", None),
        ("declared", ", is_zero_without_advantage=True", [False] * 4),
    ]:
        file = tmp_path / f"{name}.py"
        file.write_text(source.format(trait=trait))
        rows = rows_with_signal(given, AlgoConfig(loss=str(file)))
        assert (rows if rows is None else rows.tolist()) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "gigpo"},
        {"egpo": EgpoConfig(lam=0.4)},
        {"entropy_advantage_weight": 0.2},
        {"kl_coef": 0.1, "kl_placement": KlPlacement.reward},
    ],
    ids=["whitened over the batch", "discounted", "EGPO", "AEPO", "KL in the reward"],
)
def test_rewards_alone_do_not_say_which_rows_count(changes):
    assert rows_to_score(batch(reward_B=torch.ones(4)), AlgoConfig(**changes)) is None


def test_groups_whose_rewards_differ_are_scored():
    given = batch(reward_B=torch.tensor([0.1, 0.1, 0.1, 0.2]))
    assert rows_to_score(given, AlgoConfig()).tolist() == [False, False, True, True]
    # Without trained tokens a row is in no comparison.
    masked = given.with_fields(mask_BT=torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]]).bool())
    assert rows_to_score(masked, AlgoConfig()).tolist() == [False] * 4


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7e-8, 123456.789])
@pytest.mark.parametrize("name", ZERO_IF_EQUAL)
def test_equal_rewards_give_exactly_no_advantage(name, reward):
    generator = torch.Generator().manual_seed(5)
    given = make_tree_batch(FORKED_TREES)
    reward_B = torch.rand(given.num_rows, generator=generator)
    reward_B[given.group_B == 0] = reward
    given = given.with_fields(reward_B=reward_B)
    options = ESTIMATORS.find(name).options
    variants = [{}] + ([{"shrinkage": None}] if "shrinkage" in options else [])
    for variant in variants:
        algo = AlgoConfig(advantage=name, advantage_options=variant)
        to_score_B = rows_to_score(given, algo)
        assert not to_score_B[given.group_B == 0].any()
        advantage_BT, _ = advantages(given, algo)
        scored = given.with_fields(is_scored_B=to_score_B, advantage_BT=advantage_BT)
        with_signal_B = rows_with_signal(scored, algo)
        assert not (with_signal_B & ~to_score_B).any()
        assert with_signal_B.any()


@pytest.mark.parametrize("name", LOSSES.registered())
def test_losses_are_zero_without_advantages(name):
    from mega_agentrl.actor.training.objectives import compute_policy_loss

    assert AlgoConfig(loss=name).loss_traits.is_zero_without_advantage
    generator = torch.Generator().manual_seed(2)
    logp_BT = torch.randn(3, 7, generator=generator).requires_grad_()
    old_BT, mask_BT = torch.randn(3, 7, generator=generator), torch.rand(3, 7) < 0.7
    loss_BT, _ = compute_policy_loss(
        AlgoConfig(loss=name), logp_BT, old_BT, torch.zeros(3, 7), mask_BT
    )
    loss_BT.sum().backward()
    assert not loss_BT.any() and not logp_BT.grad.any()


def test_the_mismatch_is_that_of_rows_that_were_scored():
    given = batch(
        old_logp_BT=torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.0, 0.0], [0.0, 0.0]]),
        entropy_BT=torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]),
        rollout_logp_BT=torch.full((4, 2), 0.2),
        rollout_entropy_BT=torch.full((4, 2), 0.75),
        is_scored_B=torch.tensor([True, True, False, False]),
    )
    expected = mismatch_metrics(select_rows(given, [0, 1]))
    assert mismatch_metrics(given) == pytest.approx(expected)
    assert expected["mismatch/entropy_mean_abs"] == pytest.approx(0.25)
