"""`algo.at2po`: a hand-worked tree, and what holds in every tree."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.algo.at2po import at2po
from mega_agentrl.errors import InputError

# Two roots; the second one forks into two leaves, which weigh 3 to 1.
TREE = {
    "group_L": torch.tensor([0, 0, 0]),
    "leaf_node_L": torch.tensor([0, 2, 3]),
    "parent_N": torch.tensor([-1, -1, 1, 1]),
    "entropy_N": torch.tensor([0.5, 0.25, math.log(3), 0.0]),
}


def test_values_are_means_weighted_by_the_entropies_of_the_children():
    got = at2po(torch.tensor([2.0, 0.0, 1.0]), **TREE)
    # Mean 1, biased variance 2/3; the fork is 3/4 of the second leaf and 1/4 of the third.
    top = 1.5**0.5
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([top, -0.75 * top, -top, 0.0], abs=1e-5)


def test_equal_rewards_give_zero_advantages():
    assert at2po(torch.tensor([2.0, 2.0, 2.0]), **TREE).tolist() == [0.0] * 4


def test_prompts_have_trees_of_their_own():
    reward = torch.tensor([2.0, 0.0, 1.0])
    alone = at2po(reward, **TREE)
    parent_N = TREE["parent_N"]
    got = at2po(
        torch.cat((reward, 10 * reward)),
        torch.tensor([7, 7, 7, 3, 3, 3]),
        torch.cat((TREE["leaf_node_L"], TREE["leaf_node_L"] + 4)),
        torch.cat((parent_N, torch.where(parent_N < 0, -1, parent_N + 4))),
        TREE["entropy_N"].repeat(2),
    )
    torch.testing.assert_close(got, torch.cat((alone, alone)), atol=1e-5, rtol=0)


def test_a_leaf_that_others_continue_is_a_child_of_entropy_0():
    got = at2po(
        torch.tensor([1.0, -1.0]),
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
        torch.tensor([-1, 0]),
        torch.tensor([5.0, math.log(3)]),
    )
    assert got.tolist() == pytest.approx([(1 - 3) / 4, -1.0], abs=1e-5)


def test_a_node_that_does_not_exist_is_named():
    with pytest.raises(InputError) as caught:
        at2po(
            torch.ones(3),
            **(TREE | {"parent_N": torch.tensor([-1, -1]), "entropy_N": torch.ones(2)}),
        )
    assert (caught.value.name, caught.value.got) == ("leaf_node_L", (0, 3))
