"""`algo.tree_credit`: hand-worked trees, and what holds in every tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.advantage import grpo
from mega_agentrl.algo.tree_credit import fork_advantages, token_tree, tree_grpo
from mega_agentrl.errors import InputError

# Two roots; the second one forks into two leaves.
FORKED = {
    "reward_L": torch.tensor([1.0, 0.0, 1.0]),
    "leaf_node_L": torch.tensor([0, 2, 3]),
    "parent_N": torch.tensor([-1, -1, 1, 1]),
}
# Three roots, in each of which two leaves end.
PAIRS = {"leaf_node_L": torch.tensor([0, 0, 1, 1, 2, 2]), "parent_N": torch.tensor([-1, -1, -1])}


@st.composite
def forests(draw):
    """Trees of one prompt, each node of which has a leaf below it; leaves may share a node."""
    num_nodes = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    ends = [node for node in range(num_nodes) if node not in parents]
    leaves = ends + draw(st.lists(st.integers(0, num_nodes - 1), max_size=6))
    rewards = draw(st.lists(st.integers(-3, 3), min_size=len(leaves), max_size=len(leaves)))
    return {
        "reward_L": torch.tensor(rewards, dtype=torch.float64),
        "leaf_node_L": torch.tensor(leaves),
        "parent_N": torch.tensor(parents),
    }


SHRINKAGES = st.sampled_from([0.0, 1.0, 2.5, None])


@pytest.mark.parametrize(
    ("shrinkage", "expected"),
    [(0.0, [1 / 3, -1 / 6, -1 / 2, 1 / 2]), (1.0, [1 / 6, -1 / 9, -5 / 18, 2 / 9])],
    ids=["none", "one_leaf"],
)
def test_values_are_shrunk_to_the_parents(shrinkage, expected):
    got = fork_advantages(**FORKED, shrinkage=shrinkage)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # s^2 = 1/6, distance = 1: the factor is 5/6.
        ([0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [-5 / 12, 5 / 12, 0.0]),
        # s^2 = 1/3, distance = 1/3: nothing is left.
        ([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0]),
        # No noise within the children: nothing is taken off.
        ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [-1.0, 0.0, 1.0]),
    ],
    ids=["some", "all", "no_noise"],
)
def test_james_stein_shrinks_by_the_noise_among_the_leaves(rewards, expected):
    got = fork_advantages(torch.tensor(rewards), **PAIRS, shrinkage=None)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_james_stein_needs_three_children_and_a_variance():
    no_forks = fork_advantages(**FORKED, shrinkage=0.0)
    torch.testing.assert_close(fork_advantages(**FORKED, shrinkage=None), no_forks)
    reward, roots = torch.tensor([1.0, 0.0, 0.5]), torch.full((3,), -1)
    got = fork_advantages(reward, torch.arange(3), roots, shrinkage=None)
    assert got.tolist() == [0.5, -0.5, 0.0]


@given(forests())
def test_advantages_of_a_path_add_up_to_the_leaf_s(forest):
    got = fork_advantages(**forest, shrinkage=0.0)
    leaves, parents = forest["leaf_node_L"].tolist(), forest["parent_N"].tolist()
    mean = forest["reward_L"].mean()
    for leaf, node in enumerate(leaves):
        if leaves.count(node) > 1 or node in parents:
            continue  # its value is a mean over several leaves
        total = 0.0
        while node >= 0:
            total, node = total + float(got[node]), parents[node]
        assert total == pytest.approx(float(forest["reward_L"][leaf] - mean))


@given(forests(), SHRINKAGES, st.integers(-5, 5), st.randoms(use_true_random=False))
def test_order_of_leaves_and_level_of_rewards_do_not_matter(forest, shrinkage, level, random):
    got = fork_advantages(**forest, shrinkage=shrinkage)
    order = list(range(len(forest["reward_L"])))
    random.shuffle(order)
    other = fork_advantages(
        forest["reward_L"][order] + level,
        forest["leaf_node_L"][order],
        forest["parent_N"],
        shrinkage=shrinkage,
    )
    torch.testing.assert_close(other, got)


@given(forests(), forests(), SHRINKAGES)
def test_prompts_do_not_matter_to_each_other(first, second, shrinkage):
    num_nodes, parents = len(first["parent_N"]), second["parent_N"]
    groups = [torch.full_like(one["leaf_node_L"], 7 + k) for k, one in enumerate((first, second))]
    got = fork_advantages(
        torch.cat((first["reward_L"], second["reward_L"])),
        torch.cat((first["leaf_node_L"], second["leaf_node_L"] + num_nodes)),
        torch.cat((first["parent_N"], torch.where(parents < 0, -1, parents + num_nodes))),
        shrinkage=shrinkage,
        group_L=torch.cat(groups),
    )
    alone = [fork_advantages(**one, shrinkage=shrinkage) for one in (first, second)]
    torch.testing.assert_close(got, torch.cat(alone))


@given(forests())
def test_shrinkage_makes_the_first_step_smaller(forest):
    roots = forest["parent_N"] < 0
    sizes = [
        fork_advantages(**forest, shrinkage=shrinkage)[roots].abs() for shrinkage in (0.0, 1.0, 9.0)
    ]
    assert bool((sizes[0] >= sizes[1]).all() and (sizes[1] >= sizes[2]).all())


def test_without_forks_it_is_grpo_without_the_deviation():
    reward, group = torch.tensor([1.0, 0.0, 0.25, 1.0]), torch.tensor([4, 4, 9, 9])
    got = fork_advantages(
        reward, torch.arange(4), torch.full((4,), -1), shrinkage=0.0, group_L=group
    )
    torch.testing.assert_close(got, grpo(reward, group, norm_by_std=False))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"leaf_node_L": torch.tensor([0, 2, 4])}, "leaf_node_L"),
        ({"leaf_node_L": torch.tensor([0, 2, -1])}, "leaf_node_L"),
        ({"parent_N": torch.tensor([-1, 2, 1, 1])}, "parent_N"),
        ({"parent_N": torch.tensor([-2, -1, 1, 1])}, "parent_N"),
        ({"leaf_node_L": torch.tensor([0, 2])}, "reward_L, leaf_node_L, group_L"),
        ({"shrinkage": -0.5}, "shrinkage"),
        ({"shrinkage": float("nan")}, "shrinkage"),
    ],
    ids=["no_node", "no_leaf", "cycle", "no_parent", "shape", "negative", "nan"],
)
def test_values_that_describe_no_trees_are_refused_by_name(change, name):
    with pytest.raises(InputError) as caught:
        fork_advantages(**{**FORKED, "shrinkage": 1.0, **change})
    assert caught.value.name == name


def test_nodes_of_a_batch_are_its_shared_runs_of_tokens():
    # Rows 0 to 2 share two tokens; 0 and 1 share two more behind a tool's token (90), which is
    # masked. Row 3 is alone, row 4 failed, row 5 ends where row 0 is forked.
    token = torch.tensor(
        [
            [10, 11, 90, 12, 13, 14],
            [10, 11, 90, 12, 13, 15],
            [10, 11, 90, 16, 17, 17],
            [20, 21, 22, 22, 22, 22],
            [30, 31, 32, 33, 34, 35],
            [10, 11, 90, 91, 91, 91],
        ]
    )
    mask = torch.tensor(
        [
            [1, 1, 0, 1, 1, 1],
            [1, 1, 0, 1, 1, 1],
            [1, 1, 0, 1, 1, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
        ]
    )
    tree = token_tree(token, mask.bool())
    assert tree.node_BT.tolist() == [
        [0, 0, -1, 1, 1, 2],
        [0, 0, -1, 1, 1, 3],
        [0, 0, -1, 4, 4, -1],
        [5, 5, 5, -1, -1, -1],
        [-1] * 6,
        [0, 0, -1, -1, -1, -1],
    ]
    assert tree.parent_N.tolist() == [-1, 0, 1, 1, 0, -1]
    assert tree.leaf_node_B.tolist() == [2, 3, 4, 5, -1, 0]
    assert tree.root_B.tolist() == [0, 0, 0, 5, -1, 0]


def test_tree_grpo_adds_the_comparisons_in_the_tree_and_in_the_prompt():
    # Trees of two, one and one leaf; the mean of the prompt is 1/2.
    reward, root = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([3, 3, 1, 0])
    got = tree_grpo(reward, root, torch.zeros(4), norm_by_std=False)
    assert got.tolist() == [1.0, -1.0, 0.5, -0.5]
    # Divided by the standard deviations, sqrt(1/2) in the tree and sqrt(1/3) of the prompt.
    got = tree_grpo(reward, root, torch.zeros(4))
    both = 0.5**0.5 + 0.75**0.5
    assert got.tolist() == pytest.approx([both, -both, 0.75**0.5, -(0.75**0.5)], abs=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (2, 3)], ids=["no_rows", "all_masked"])
def test_a_batch_without_trained_tokens_has_no_nodes(shape):
    tree = token_tree(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool))
    assert tree.parent_N.tolist() == []
    assert bool((tree.node_BT == -1).all())
    assert tree.leaf_node_B.tolist() == [-1] * shape[0]
