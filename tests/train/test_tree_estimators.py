"""Advantages from trees and turns, on numbers worked by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from mega_agentrl.config.sections.algo import AlgoConfig
from tests.train.test_advantages import advantages, batch


def test_at2po_weighs_a_fork_by_the_entropies_of_its_first_turns():
    """A shared turn; after a tool's token one leaf has a turn of entropy ln 3 and one of 9, the
    other a turn of entropy 0."""
    log3 = math.log(3)
    entropy_BT = torch.tensor([[1, 0, 2 * log3, 0, 0, 9], [1, 0, 0, 0, 0, 0]])
    given = batch(
        prompt_ids=((1,),) * 2,
        response_BT=torch.ones(2, 6, dtype=torch.int64),
        length_B=torch.tensor([6, 4]),
        mask_BT=torch.tensor([[1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 0]]).bool(),
        group_B=torch.tensor([0, 0]),
        reward_B=torch.tensor([1.0, 0.0]),
        tree_token_BT=torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8, 9]]),
        rollout_logp_BT=-entropy_BT,
        rollout_entropy_BT=torch.zeros(2, 6),
        version_BT=torch.zeros(2, 6, dtype=torch.int64),
        baseline_B=None,
        value_BT=None,
    )
    got_BT, _ = advantages(given, AlgoConfig(advantage="at2po"))
    expected = [[0.5, 0, 1, 1, 0, 1], [0.5, 0, -1, -1, 0, 0]]
    assert_close(got_BT, torch.tensor(expected), atol=1e-5, rtol=0)
    exact = AlgoConfig(advantage="at2po", advantage_options={"exact_entropy": True})
    assert advantages(given, exact)[0][:, 0].tolist() == [0, 0]


def test_appo_released_trains_the_first_trajectory_of_a_tree_alone():
    """Two roots of one prompt; the first one has two forks. Engine and trainer agree but for the
    last token of row 0, by ln 1.1."""
    given = batch(
        group_B=torch.zeros(4, dtype=torch.int64),
        reward_B=torch.tensor([1.0, 3.0, 1.0, 0.0]),
        tree_token_BT=torch.tensor([[0, 1], [0, 2], [0, 3], [4, 5]]),
        old_logp_BT=torch.tensor([[0, math.log(1.1)], [0, 0], [0, 0], [0, 0]]),
    )
    options = {"decay_tokens": 1e9, "weight": 2.0}
    got_BT, _ = advantages(given, AlgoConfig(advantage="appo_released", advantage_options=options))
    # The initial ones have 1 and -1, the forks 1 and -1, whose mean of 0 the shared token gets.
    expected = [[1 + 2 * 1.1] * 2, [0, 0], [0, 0], [-3, 0]]
    assert_close(got_BT, torch.tensor(expected), atol=1e-4, rtol=0)


def test_gigpo_compares_turns_after_equal_answers_of_the_tool():
    """A tool's token between two sampled ones: 7 for the first three rows, 8 for the last."""
    response_BT = torch.tensor([[1, 7, 2], [3, 7, 4], [5, 7, 6], [1, 8, 2]])
    given = batch(
        response_BT=response_BT,
        length_B=torch.full((4,), 3),
        mask_BT=torch.tensor([[1, 0, 1]] * 4).bool(),
        tree_token_BT=torch.arange(12).view(4, 3),
        rollout_logp_BT=torch.zeros(4, 3),
        rollout_entropy_BT=torch.zeros(4, 3),
        version_BT=torch.zeros(4, 3, dtype=torch.int64),
        value_BT=None,
    )
    options = {"gamma": 0.5, "norm_by_std": False}
    got_BT, _ = advantages(given, AlgoConfig(advantage="gigpo", advantage_options=options))
    # The first turns of a prompt start alike, with half the return; of the second turns, rows 2 and
    # 3 differ in the answer.
    assert got_BT.tolist() == [[0.75, 0, 1], [-0.75, 0, -1], [1.5, 0, 1], [-1.5, 0, -1]]


def test_hgpo_compares_turns_by_how_many_answers_they_have_in_common():
    """Sampled a, tool x, sampled b, tool y, sampled c; three rows of one prompt."""
    response_BT = torch.tensor([[1, 7, 2, 9, 3], [1, 7, 2, 9, 4], [5, 8, 2, 9, 6], [1, 7, 2, 9, 3]])
    given = batch(
        response_BT=response_BT,
        length_B=torch.full((4,), 5),
        mask_BT=torch.tensor([[1, 0, 1, 0, 1]] * 4).bool(),
        group_B=torch.tensor([0, 0, 0, 1]),
        reward_B=torch.tensor([3.0, 0.0, 0.0, 1.0]),
        tree_token_BT=torch.arange(20).view(4, 5),
        rollout_logp_BT=torch.zeros(4, 5),
        rollout_entropy_BT=torch.zeros(4, 5),
        version_BT=torch.zeros(4, 5, dtype=torch.int64),
        value_BT=None,
    )

    def rows(**options):
        algo = AlgoConfig(advantage="hgpo", advantage_options={"gamma": 1.0} | options)
        return advantages(given, algo)[0][:, ::2]

    # Depth 0 compares with a mean of 1 the first and the last turns, with 1.5 the middle ones after
    # answer 7. Depth 1, of weight 3 to 2: answers 7 and 9 have a mean of 1.5.
    last = [(2 * 2 + 3 * 1.5) / 5, (2 * -1 + 3 * -1.5) / 5, -1]
    expected_BT = torch.tensor([[2, 1.5, last[0]], [-1, -1.5, last[1]], [-1, 0, -1], [0, 0, 0]])
    assert_close(rows(history=1, exact_history=False), expected_BT)
    # The first two rows' last turns have equal tokens before them: one more depth, of weight 3 to
    # 2 without earlier answers; the first turns' mean is the same at either depth.
    assert_close(rows(history=0), expected_BT)
    # All of weight 2 to 4, 3 to 4.
    exact = rows(history=1)
    assert exact[0].tolist() == pytest.approx([2, 1.5, (2 * 2 + (3 + 4) * 1.5) / 9])
