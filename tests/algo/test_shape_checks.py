"""`algo.shape_checks`: errors name every tensor with its shape."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.shape_checks import check_rank, check_same_rows, check_same_shape


def test_rank_follows_the_suffix():
    check_rank(reward_B=torch.zeros(3), logprob_TK=torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"logp_BT: got shape \(3,\), expected 2 axes \[B, T\]"):
        check_rank(logp_BT=torch.zeros(3))


def test_wrong_rank_error_names_all_shapes():
    with pytest.raises(ValueError, match=r"reward_B: got shape \(2, 2\).*group_B \(4,\)"):
        check_same_shape(reward_B=torch.zeros(2, 2), group_B=torch.zeros(4))
    with pytest.raises(ValueError, match=r"grid_BT: got shape \(5,\).*row_B \(2,\)"):
        check_same_rows(torch.zeros(2), torch.zeros(5))


def test_unequal_shapes_are_named():
    check_same_shape(logp_BT=torch.zeros(2, 3), mask_BT=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"logp_BT \(2, 3\), mask_BT \(2, 4\)"):
        check_same_shape(logp_BT=torch.zeros(2, 3), mask_BT=torch.ones(2, 4))


def test_rows_must_agree():
    check_same_rows(torch.zeros(2), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"\(3,\) and \[B, T\] \(2, 5\)"):
        check_same_rows(torch.zeros(3), torch.zeros(2, 5))
