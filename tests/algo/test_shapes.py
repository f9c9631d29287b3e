"""`algo.shapes`: the errors name every tensor and its shape."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.shapes import check_rank, same_rows, same_shape


def test_rank_follows_the_suffix():
    check_rank(reward_B=torch.zeros(3), logprob_TK=torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"logp_BT: got shape \(3,\), expected 2 axes \[B, T\]"):
        check_rank(logp_BT=torch.zeros(3))


def test_a_wrong_rank_is_told_with_all_shapes():
    with pytest.raises(ValueError, match=r"reward_B: got shape \(2, 2\).*group_B \(4,\)"):
        same_shape(reward_B=torch.zeros(2, 2), group_B=torch.zeros(4))
    with pytest.raises(ValueError, match=r"grid_BT: got shape \(5,\).*row_B \(2,\)"):
        same_rows(torch.zeros(2), torch.zeros(5))


def test_one_shape_or_both_are_named():
    same_shape(logp_BT=torch.zeros(2, 3), mask_BT=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"logp_BT \(2, 3\), mask_BT \(2, 4\)"):
        same_shape(logp_BT=torch.zeros(2, 3), mask_BT=torch.ones(2, 4))


def test_rows_must_agree():
    same_rows(torch.zeros(2), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"\(3,\) and \[B, T\] \(2, 5\)"):
        same_rows(torch.zeros(3), torch.zeros(2, 5))
