"""Corrections and advantages of a batch, on numbers worked by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from mega_agentrl.algo.masking import masked_whiten
from mega_agentrl.config.algorithm_traits import ESTIMATORS
from mega_agentrl.config.enums import (
    AresMode,
    CotBlocks,
    KlEstimator,
    KlPlacement,
    RolloutCorrection,
)
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from mega_agentrl.errors import InputError
from mega_agentrl.train.advantages import (
    add_advantages,
    add_importance_weights,
    check_zero_mismatch,
    mismatch_metrics,
)
from mega_agentrl.types.batch import TrainBatch
from tests.train_batches import select_rows

OPEN, CLOSE = 8, 9
NOT_BY_STD = {"norm_by_std": False}


def batch(**changes):
    """Two groups of two; row 1 holds row 0's first token, row 3 is half masked."""
    zeros_BT = torch.zeros(4, 2)
    values = {
        "prompt_ids": ((1,),) * 4,
        "response_BT": torch.ones(4, 2, dtype=torch.int64),
        "length_B": torch.full((4,), 2),
        "mask_BT": torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool(),
        "group_B": torch.tensor([0, 0, 1, 1]),
        "reward_B": torch.tensor([1.0, 0.0, 3.0, 1.0]),
        "tree_token_BT": torch.tensor([[0, 1], [0, 2], [3, 4], [5, 6]]),
        "rollout_logp_BT": zeros_BT,
        "rollout_entropy_BT": zeros_BT,
        "version_BT": torch.zeros(4, 2, dtype=torch.int64),
        "baseline_B": torch.tensor([0.25, 0.25, 4.0, 4.0]),
        "value_BT": torch.tensor([[0.5, 0.25], [0.0, 1.0], [2.0, -1.0], [0.5, 8.0]]),
    }
    return TrainBatch(**(values | changes))


def thinking(**changes):
    """Six tokens a row: `<t> a b </t> c d`, `a </t> c d e f` (opened by the template), no markers,
    and `<t> a </t> <t> b </t>`; entropies are 0.1 in the first block and 5 elsewhere."""
    response_BT = torch.tensor(
        [
            [OPEN, 1, 1, CLOSE, 2, 2],
            [1, CLOSE, 2, 2, 2, 2],
            [2, 2, 2, 2, 2, 2],
            [OPEN, 1, CLOSE, OPEN, 1, CLOSE],
        ]
    )
    entropy_BT = torch.full((4, 6), 5.0)
    entropy_BT[0, 1:3] = entropy_BT[1, 0] = entropy_BT[3, 1] = 0.1
    values = {
        "response_BT": response_BT,
        "length_B": torch.full((4,), 6),
        "mask_BT": torch.ones(4, 6).bool(),
        "tree_token_BT": torch.arange(24).view(4, 6),
        "rollout_logp_BT": torch.zeros(4, 6),
        "rollout_entropy_BT": entropy_BT,
        "version_BT": torch.zeros(4, 6, dtype=torch.int64),
        "value_BT": None,
        "entropy_BT": entropy_BT,
    }
    return batch(**(values | changes))


def advantages(given_batch, algo, kl_coef=None, cot_marker_ids=((OPEN,), (CLOSE,))):
    kl_coef = algo.kl_coef if kl_coef is None else kl_coef
    filled, metrics = add_advantages(
        given_batch, algo, kl_coef=kl_coef, cot_marker_ids=cot_marker_ids
    )
    return filled.advantage_BT, metrics


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [[0.5, 0.5], [-0.5, -0.5], [1, 1], [-1, 0]]),
        ("rloo", [[1, 1], [-1, -1], [2, 2], [-2, 0]]),
        ("arpo_hard", [[0, 0.5], [0, -0.5], [1, 1], [-1, 0]]),
        ("remax", [[0.75, 0.75], [-0.25, -0.25], [-1, -1], [-3, 0]]),
        # One leaf counts half; the token that two leaves share has the value of the group.
        ("fork_credit", [[0, 0.25], [0, -0.25], [0.5, 0.5], [-0.5, 0]]),
        ("tree_grpo", [[1, 1], [-1, -1], [1, 1], [-1, 0]]),
        # GRPO's, and beside it those of fork_credit.
        ("appo", [[0.5, 0.75], [-0.5, -0.75], [1.5, 1.5], [-1.5, 0]]),
    ],
)
def test_each_estimator_has_the_advantages_worked_out_by_hand(name, expected):
    options = {} if name in ("rloo", "remax") else NOT_BY_STD
    algo = AlgoConfig(advantage=name, advantage_options=options)
    advantage_BT, metrics = advantages(batch(), algo)
    assert advantage_BT.tolist() == expected
    flat = [abs(value) for row in expected for value in row][:7]
    assert metrics == {
        "advantage/abs_mean": pytest.approx(sum(flat) / 7),
        "advantage/zero_fraction": pytest.approx(flat.count(0) / 7),
        "advantage/num_without_baseline": 0,
    }


def test_reinforce_plus_plus_whitens_returns_with_and_without_a_baseline():
    """Returns 1 1, 0 0, 3 3, 1: mean 9/7, squares 21 - 81/7 = 66/7 over 6."""
    got_BT, _ = advantages(batch(), AlgoConfig(advantage="reinforce_plus_plus"))
    std = math.sqrt(66 / 7 / 6)
    expected_BT = (torch.tensor([[1.0, 1], [0, 0], [3, 3], [1, 9 / 7]]) - 9 / 7) / std
    assert_close(got_BT, expected_BT)
    # With a baseline: .5 .5, -.5 -.5, 1 1, -1: mean 1/7, squares 4 - 1/7 over 6.
    got_BT, _ = advantages(batch(), AlgoConfig(advantage="reinforce_plus_plus_baseline"))
    std = math.sqrt((4 - 1 / 7) / 6)
    expected_BT = (torch.tensor([[0.5, 0.5], [-0.5, -0.5], [1, 1], [-1, 1 / 7]]) - 1 / 7) / std
    assert_close(got_BT, expected_BT)


@pytest.mark.parametrize("name", ESTIMATORS.registered())
def test_rows_of_one_trajectory_share_its_advantage_and_count_once(name):
    """Whole trajectories of two tokens, and the same cut into rows of one token and a spare."""
    ref_BT = torch.tensor([[0.1, 0.2], [0.4, 0.8], [1.6, 3.2], [6.4, 12.8]])
    scored = {"old_logp_BT": torch.zeros(4, 2), "ref_logp_BT": -ref_BT}
    own_BT = torch.arange(8).view(4, 2)
    mask_BT = torch.ones(4, 2).bool()
    plain = batch(**scored, tree_token_BT=own_BT, mask_BT=mask_BT)
    rows, places = [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 1, 0, 1]
    cut = select_rows(plain, rows)
    first_BT = torch.tensor([[True, False]] * 8)

    def cut_grid(grid_BT):
        picked_B = grid_BT[rows, places].unsqueeze(1)
        return torch.where(first_BT, picked_B, torch.zeros_like(picked_B))

    grids = ("mask_BT", "old_logp_BT", "ref_logp_BT", "tree_token_BT", "value_BT")
    cut = cut.with_fields(
        **{grid: cut_grid(getattr(cut, grid)[::2]) for grid in grids},
        trajectory_B=torch.tensor([7, 7, 3, 3, 5, 5, 6, 6]),
        length_B=torch.ones(8, dtype=torch.int64),
    )
    # Cut into rows, a turn counts as two, so no turn may be discounted.
    options = {"gamma": 1.0} if "gamma" in ESTIMATORS.find(name).options else {}
    algo = AlgoConfig(
        advantage=name,
        advantage_options=options,
        kl_coef=0.1,
        kl_estimator=KlEstimator.k1,
        kl_placement=KlPlacement.reward,
    )
    expected_BT, expected = advantages(plain, algo)
    got_BT, got = advantages(cut, algo)
    assert_close(got_BT, cut_grid(expected_BT))
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("name", ESTIMATORS.registered())
def test_a_failed_row_changes_no_other_advantage(name):
    plain = batch()
    failed = select_rows(plain, [0, 1, 2, 3, 3]).with_fields(
        group_B=torch.tensor([0, 0, 1, 1, 2]),
        reward_B=torch.tensor([1.0, 0.0, 3.0, 1.0, 0.0]),
        mask_BT=torch.cat([plain.mask_BT, torch.zeros(1, 2).bool()]),
        entropy_BT=torch.ones(5, 2),
        old_logp_BT=torch.zeros(5, 2),
    )
    is_per_trajectory = AlgoConfig(advantage=name).estimator.per_trajectory
    settings = {"lam": 0.4} if is_per_trajectory else {}
    egpo = EgpoConfig(cot_blocks=CotBlocks.response, **settings)
    algo = AlgoConfig(advantage=name, egpo=egpo, entropy_advantage_weight=0.2)
    scored = {"entropy_BT": torch.ones(4, 2), "old_logp_BT": torch.zeros(4, 2)}
    expected_BT, expected = advantages(plain.with_fields(**scored), algo)
    got_BT, got = advantages(failed, algo)
    assert torch.equal(got_BT[:4], expected_BT) and not got_BT[4].any()
    assert got == pytest.approx(expected)


COMPARING = [
    name
    for name in ESTIMATORS.registered()
    if AlgoConfig(advantage=name).estimator.needs_groups or name == "remax"
]


@pytest.mark.parametrize("name", COMPARING)
def test_the_only_one_that_did_not_fail_has_no_baseline_and_no_advantage(name):
    """Rows 2 and 3 are a group of which one failed; the other's reward of 3 is no advantage."""
    one_left = batch(
        group_B=torch.tensor([0, 0, 1, 2]),
        mask_BT=torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]]).bool(),
        tree_token_BT=torch.arange(8).view(4, 2),
        baseline_B=torch.tensor([0.25, 0.25, math.nan, math.nan]),
        old_logp_BT=torch.zeros(4, 2),
        entropy_BT=torch.ones(4, 2),
    )
    lam = 0.4 if AlgoConfig(advantage=name).estimator.per_trajectory else 0.0
    egpo = EgpoConfig(cot_blocks=CotBlocks.response, lam=lam)
    algo = AlgoConfig(advantage=name, egpo=egpo)
    got_BT, metrics = advantages(one_left, algo)
    assert metrics["advantage/num_without_baseline"] == 1
    assert not got_BT[2:].any() and got_BT[:2].any()
    alone_BT, _ = advantages(select_rows(one_left, [0, 1]), algo)
    assert_close(got_BT[:2], alone_BT)
    # If the others of every group failed, nothing is left to learn from.
    nothing_BT, metrics = advantages(select_rows(one_left, [2, 3]), algo)
    assert not nothing_BT.any() and metrics["advantage/num_without_baseline"] == 1


def test_a_greedy_answer_is_the_baseline_of_the_only_one_that_did_not_fail():
    given = select_rows(batch(group_B=torch.tensor([0, 1, 2, 3])), [0, 2])
    got_BT, metrics = advantages(given, AlgoConfig(advantage="remax"))
    assert_close(got_BT, torch.tensor([[0.75, 0.75], [-1.0, -1.0]]))
    assert metrics["advantage/num_without_baseline"] == 0


def test_kl_in_the_reward_is_summed_over_the_trajectory():
    """k1 of 0.1 and 0.2 on row 0, 9 behind a mask on row 3: 1 - 2 * .3 = .4 against 0."""
    gap_BT = torch.tensor([[0.1, 0.2], [0, 0], [0, 0], [0, 9.0]])
    scored = batch(old_logp_BT=gap_BT, ref_logp_BT=torch.zeros(4, 2))
    algo = AlgoConfig(
        kl_coef=0.5,
        kl_estimator=KlEstimator.k1,
        kl_placement=KlPlacement.reward,
        advantage_options=NOT_BY_STD,
    )
    got_BT, metrics = advantages(scored, algo, kl_coef=2.0)
    expected_BT = torch.tensor([[0.2, 0.2], [-0.2, -0.2], [1, 1], [-1, 0]])
    assert_close(got_BT, expected_BT)
    assert metrics["advantage/ref_kl"] == pytest.approx(0.3 / 7)


def test_each_token_s_kl_in_the_reward_has_the_weight_of_ares():
    algo = AlgoConfig(
        advantage="rloo",
        ares=AresConfig(mode=AresMode.paper),
        kl_coef=0.0,
        kl_placement=KlPlacement.reward,
        kl_estimator=KlEstimator.k1,
    )
    ref_BT = torch.tensor([[-1.0, -2.0], [0, 0], [0, 0], [0, 0]])
    given = batch(old_logp_BT=torch.zeros(4, 2), ref_logp_BT=ref_BT)
    weight_BT = torch.tensor([[0.5, 0.25], [9, 9], [9, 9], [9, 9]])
    filled, _ = add_advantages(
        given, algo, kl_coef=0.0, cot_marker_ids=None, kl_weight_BT=weight_BT
    )
    # The first reward is 1 - 0.5 * 1 - 0.25 * 2.
    assert filled.advantage_BT[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_kl_in_the_reward_is_taken_off_each_token():
    """Returns with 2 * KL off each token: row 0 has 1 - .6 and 1 - .4, row 3 has 1."""
    gap_BT = torch.tensor([[0.1, 0.2], [0, 0], [0, 0], [0, 9.0]])
    scored = batch(old_logp_BT=gap_BT, ref_logp_BT=torch.zeros(4, 2))
    algo = AlgoConfig(
        advantage="reinforce_plus_plus",
        kl_coef=2.0,
        kl_estimator=KlEstimator.k1,
        kl_placement=KlPlacement.reward,
    )
    return_BT = torch.tensor([[0.4, 0.6], [0, 0], [3, 3], [1, 0]])
    assert_close(advantages(scored, algo)[0], masked_whiten(return_BT, scored.mask_BT))


def test_kl_in_the_loss_leaves_the_reward():
    algo = AlgoConfig(kl_coef=2.0)
    scored = batch(old_logp_BT=torch.ones(4, 2), ref_logp_BT=torch.zeros(4, 2))
    assert torch.equal(advantages(scored, algo)[0], advantages(batch(), AlgoConfig())[0])


def test_egpo_adds_the_entropy_of_the_chain_of_thought_only():
    """A = .5, -.5, 1, -1; H = .1, .1, none, .1, all within |A| / 2: the bonus is .4 * .1."""
    algo = AlgoConfig(advantage_options=NOT_BY_STD, egpo=EgpoConfig(lam=0.4))
    got_BT, metrics = advantages(thinking(), algo)
    assert_close(got_BT[:, 0], torch.tensor([0.54, -0.46, 1.0, -0.96]))
    assert torch.equal(got_BT, got_BT[:, :1].expand(4, 6))
    assert metrics["egpo/cot_entropy"] == pytest.approx(0.075)
    assert metrics["egpo/no_cot_fraction"] == 0.25
    assert metrics["egpo/bonus_mean"] == pytest.approx(0.03)
    assert metrics["egpo/clipfrac"] == 0
    # Over the whole response the bound of |A| / 2 decides: that is another number.
    egpo = EgpoConfig(lam=0.4, cot_blocks=CotBlocks.response)
    whole = AlgoConfig(advantage_options=NOT_BY_STD, egpo=egpo)
    got_BT, metrics = advantages(thinking(), whole, cot_marker_ids=None)
    assert_close(got_BT[:, 0], torch.tensor([0.6, -0.4, 1.2, -0.8]))
    assert metrics["egpo/clipfrac"] == 1 and metrics["egpo/no_cot_fraction"] == 0


@pytest.mark.parametrize("blocks", CotBlocks)
@pytest.mark.parametrize("name", ["grpo", "arpo_hard"])
def test_egpo_reads_rows_of_one_trajectory_in_a_line(blocks, name):
    """Cut anywhere, with a tool's answer at the cut: the same bonus."""
    mask_BT = torch.ones(4, 6).bool()
    mask_BT[:, 2] = False
    plain = thinking(mask_BT=mask_BT)
    egpo = EgpoConfig(lam=0.4, alpha=1.5, cot_blocks=blocks)
    algo = AlgoConfig(advantage=name, advantage_options=NOT_BY_STD, egpo=egpo)
    expected_BT, expected = advantages(plain, algo)
    rows, sizes = [0, 0, 1, 2, 3, 3], [3, 3, 6, 6, 3, 3]
    starts = [0, 3, 0, 0, 0, 3]
    cut = select_rows(plain, rows)

    def shifted(grid_BT):
        moved_BT = torch.zeros_like(grid_BT)
        for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            moved_BT[row, :size] = grid_BT[row, start : start + size]
        return moved_BT

    grids = ("response_BT", "mask_BT", "entropy_BT", "tree_token_BT")
    cut = cut.with_fields(
        **{grid: shifted(getattr(cut, grid)) for grid in grids},
        length_B=torch.tensor(sizes),
        trajectory_B=torch.tensor([0, 0, 1, 2, 3, 3]),
    )
    got_BT, got = advantages(cut, algo)
    assert_close(got_BT, shifted(expected_BT[rows]))
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("blocks", [CotBlocks.first, CotBlocks.all])
def test_egpo_counts_a_chain_of_thought_that_the_prompt_opened_and_a_cut_off_one(blocks):
    """No marker in any response: all of it is thought where the prompt ends with the opening."""
    given = thinking(response_BT=torch.full((4, 6), 7), prompt_ids=((1, OPEN, 2),) * 3 + ((1,),))
    algo = AlgoConfig(advantage_options=NOT_BY_STD, egpo=EgpoConfig(lam=0.4, cot_blocks=blocks))
    got_BT, metrics = advantages(given, algo)
    whole = AlgoConfig(
        advantage_options=NOT_BY_STD, egpo=EgpoConfig(lam=0.4, cot_blocks=CotBlocks.response)
    )
    expected_BT, _ = advantages(given, whole, cot_marker_ids=None)
    assert_close(got_BT[:3], expected_BT[:3])
    assert metrics["egpo/no_cot_fraction"] == 0.25
    assert_close(got_BT[3], torch.full((6,), -1.0))


def test_egpo_without_markers_is_an_error():
    with pytest.raises(InputError) as caught:
        advantages(thinking(), AlgoConfig(egpo=EgpoConfig(lam=0.4)), cot_marker_ids=None)
    assert (caught.value.name, caught.value.got) == ("cot_marker_ids", None)
    assert "algo.egpo.cot_blocks=first" in caught.value.expected


@pytest.mark.parametrize(
    ("field", "setting", "algo"),
    [
        ("entropy_BT", "algo.egpo.lam=0.4", AlgoConfig(egpo=EgpoConfig(lam=0.4))),
        ("entropy_BT", "algo.entropy_advantage_weight=9", AlgoConfig(entropy_advantage_weight=9)),
        ("baseline_B", "algo.advantage=remax", AlgoConfig(advantage="remax")),
        ("value_BT", "algo.advantage=gae", AlgoConfig(advantage="gae")),
        (
            "old_logp_BT",
            "algo.kl_placement=reward",
            AlgoConfig(kl_coef=0.1, kl_placement=KlPlacement.reward),
        ),
    ],
    ids=["egpo", "aepo", "remax", "gae", "KL in the reward"],
)
def test_a_missing_field_is_named_with_the_setting_that_needs_it(field, setting, algo):
    with pytest.raises(InputError) as caught:
        advantages(thinking(**{field: None}), algo)
    assert (caught.value.name, caught.value.got) == (field, None)
    assert setting in caught.value.expected


def test_aepo_scales_by_the_entropy_of_the_token_last():
    """Entropies 0 and 1 on the 7 trained tokens: mean 3/7, variance (12/7) / 6 = 2/7."""
    entropy_BT = torch.tensor([[0.0, 1], [0, 1], [0, 1], [0, 99]])
    algo = AlgoConfig(advantage_options=NOT_BY_STD, entropy_advantage_weight=0.2)
    got_BT, metrics = advantages(batch(entropy_BT=entropy_BT), algo)
    low, high = (1 + 0.2 * (value - 3 / 7) / math.sqrt(2 / 7) for value in (0, 1))
    expected_BT = torch.tensor(
        [[0.5 * low, 0.5 * high], [-0.5 * low, -0.5 * high], [low, high], [-low, 0]]
    )
    assert_close(got_BT, expected_BT)
    assert metrics["aepo/sign_flip_fraction"] == 0
    _, metrics = advantages(batch(entropy_BT=entropy_BT), AlgoConfig(entropy_advantage_weight=9.0))
    assert metrics["aepo/sign_flip_fraction"] == pytest.approx(4 / 7)


def test_corrections_weigh_tokens_by_their_ratios():
    """Ratios e^1, e^-1, 1, 1 | e^3 in row 2; a mask on row 3 hides infinity."""
    gap_BT = torch.tensor([[1.0, -1.0], [0, 0], [3.0, 0], [0, torch.inf]])
    scored = batch(old_logp_BT=gap_BT)
    e = math.e

    def weights(correction):
        algo = AlgoConfig(rollout_correction=correction, rollout_correction_cap=2.5)
        filled, metrics = add_importance_weights(scored, algo)
        return filled.importance_weight_BT, metrics

    def expected(*rows):
        return torch.tensor(rows, dtype=torch.float32)

    weight_BT, metrics = weights(RolloutCorrection.token_truncate)
    assert_close(weight_BT, expected([2.5, 1 / e], [1, 1], [2.5, 1], [1, 0]))
    assert metrics["rollout_correction/capped_fraction"] == pytest.approx(2 / 7)
    assert metrics["rollout_correction/weight_mean"] == pytest.approx((9 + 1 / e) / 7)
    masked_BT, _ = weights(RolloutCorrection.token_mask)
    assert_close(masked_BT, expected([0, 1 / e], [1, 1], [0, 1], [1, 0]))
    truncated_BT, _ = weights(RolloutCorrection.sequence_truncate)
    assert_close(truncated_BT, expected([1, 1], [1, 1], [2.5, 2.5], [1, 0]))
    dropped_BT, _ = weights(RolloutCorrection.sequence_mask)
    assert_close(dropped_BT, expected([1, 1], [1, 1], [0, 0], [1, 0]))


def test_without_a_correction_the_batch_stays():
    plain = batch()
    assert add_importance_weights(plain, AlgoConfig()) == (plain, {})
    with pytest.raises(InputError) as caught:
        add_importance_weights(plain, AlgoConfig(rollout_correction=RolloutCorrection.token_mask))
    assert caught.value.name == "old_logp_BT"
    assert "algo.rollout_correction=token_mask" in caught.value.expected


def test_mismatch_reads_trained_tokens_only():
    old_BT = torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.1, 0.1], [0.8, 99.0]])
    entropy_BT = torch.tensor([[0.7, 0], [0, 0], [0, 0], [0, 99.0]])
    metrics = mismatch_metrics(batch(old_logp_BT=old_BT, entropy_BT=entropy_BT))
    assert metrics["mismatch/logp_mean_abs"] == pytest.approx((6 * 0.1 + 0.8) / 7)
    assert metrics["mismatch/logp_max_abs"] == pytest.approx(0.8)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-0.2)
    assert metrics["mismatch/ess"] < 1
    assert metrics["mismatch/prob_max_abs"] == pytest.approx(math.exp(0.8) - 1)
    assert metrics["mismatch/entropy_mean_abs"] == pytest.approx(0.1)
    assert metrics["mismatch/entropy_max_abs"] == pytest.approx(0.7)


def test_a_single_bit_is_a_mismatch():
    given = batch()
    given = given.with_fields(old_logp_BT=given.rollout_logp_BT.clone())
    check_zero_mismatch(given)
    given.old_logp_BT[3, 1] = 99.0  # not trained
    check_zero_mismatch(given)
    given.old_logp_BT[1, 0] = torch.nextafter(given.old_logp_BT[1, 0], torch.tensor(9.0))
    with pytest.raises(InputError) as caught:
        check_zero_mismatch(given)
    assert caught.value.name == "model.zero_mismatch: log-prob of token 0 of row 1"
    assert caught.value.got == float(given.rollout_logp_BT[1, 0])
    assert "1 of 7" in caught.value.expected


def test_remax_takes_the_others_mean_where_the_greedy_answer_failed():
    algo = AlgoConfig(advantage="remax")
    given = batch(baseline_B=torch.tensor([math.nan, math.nan, 4.0, 4.0]))
    found_BT, _ = advantages(given, algo)
    # Of rewards 1 and 0 each is the other's baseline.
    assert_close(found_BT, torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [-3.0, 0.0]]))


def test_gae_gives_the_advantages_worked_out_by_hand():
    algo = AlgoConfig(advantage="gae", advantage_options=NOT_BY_STD | {"gamma": 0.5, "lam": 0.5})
    filled, _ = add_advantages(batch(), algo, kl_coef=0.0, cot_marker_ids=None)
    # Row 0: errors 0.5 * 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75, of which a quarter goes back.
    # Row 3: one trained token, its reward 1 against a value of 0.5.
    expected_BT = torch.tensor([[-0.1875, 0.75], [0.25, -1.0], [-1.5, 4.0], [0.5, 0.0]])
    assert_close(filled.advantage_BT, expected_BT)
    on_BT = filled.mask_BT
    assert_close(filled.return_BT[on_BT], (expected_BT + filled.value_BT)[on_BT])
    white_BT, _ = advantages(batch(), AlgoConfig(advantage="gae"))
    assert_close(white_BT[on_BT].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert_close(white_BT[on_BT].std(), torch.tensor(1.0))


def test_gae_with_kl_in_the_reward_and_no_discount_is_the_return_less_the_value():
    algo = AlgoConfig(
        advantage="gae",
        advantage_options=NOT_BY_STD,
        kl_coef=0.1,
        kl_estimator=KlEstimator.k1,
        kl_placement=KlPlacement.reward,
    )
    given = batch(old_logp_BT=torch.ones(4, 2), ref_logp_BT=torch.zeros(4, 2))
    filled, metrics = add_advantages(given, algo, kl_coef=0.1, cot_marker_ids=None)
    assert metrics["advantage/ref_kl"] == pytest.approx(1.0)
    returns_BT = torch.tensor([[0.8, 0.9], [-0.2, -0.1], [2.8, 2.9], [0.9, 0.0]])
    on_BT = given.mask_BT
    assert_close(filled.return_BT[on_BT], returns_BT[on_BT])
    assert_close(filled.advantage_BT[on_BT], (returns_BT - given.value_BT)[on_BT])


def test_estimators_declare_what_they_need():
    traits = {name: AlgoConfig(advantage=name).estimator for name in ESTIMATORS.registered()}
    assert {name for name, one in traits.items() if one.needs_critic} == {"gae"}
    assert {name for name, one in traits.items() if one.needs_greedy_baseline} == {"remax"}
    assert {name for name, one in traits.items() if not one.needs_groups} == {
        "gae",
        "remax",
        "reinforce_plus_plus",
    }
