"""`algo.advantage`: golden rows, hand-worked cases, permutations, discounted sums."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo import advantage
from mega_agentrl.algo.masking import ROWS_PER_CHUNK, shift

FOLDER = Path(__file__).parents[1] / "golden"
GROUPS = json.loads((FOLDER / "group_advantages.json").read_text(encoding="utf-8"))
HARD = json.loads((FOLDER / "hard_advantage.json").read_text(encoding="utf-8"))

ESTIMATORS = {
    "grpo_verl": advantage.grpo,
    "grpo_verl_no_std": lambda r, g: advantage.grpo(r, g, norm_by_std=False),
    "rloo_verl": advantage.rloo,
}


def _ids(names):
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", GROUPS["cases"], ids=lambda case: case["name"])
def test_golden_groups(case, estimator):
    got = ESTIMATORS[estimator](torch.tensor(case["rewards"]), _ids(case["group_ids"]))
    length = torch.tensor(case["response_lengths"])
    mask = torch.arange(case["response_length"])[None] < length[:, None]
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(case[estimator]["scalar"], abs=1e-5)
    torch.testing.assert_close(
        advantage.broadcast(got, mask),
        torch.tensor(case[estimator]["tokens"]),
        atol=1e-5,
        rtol=1e-5,
    )


@given(
    st.lists(st.tuples(st.floats(-2, 2, width=32), st.integers(0, 3)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_order_and_names_of_groups_do_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    reward = torch.tensor([row[0] for row in rows])
    group = torch.tensor([row[1] for row in rows])
    for estimator in ESTIMATORS.values():
        plain = estimator(reward, group)
        torch.testing.assert_close(estimator(reward[order], group[order]), plain[order])
        torch.testing.assert_close(estimator(reward, 1000 - 7 * group), plain)


def test_constant_rewards_give_exactly_zero():
    group = torch.tensor([0, 0, 0, 1, 1])
    assert advantage.grpo(torch.full((5,), 0.1), group).tolist() == [0.0] * 5
    reward = torch.tensor([1.0, 0.5, 0.0, 2.0, -1.0])
    torch.testing.assert_close(
        advantage.grpo(reward + 8, group), advantage.grpo(reward, group), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 2)), min_size=2, max_size=12),
    st.integers(-20, 20),
)
def test_shift_of_all_rewards_changes_nothing(estimator, rows, shift):
    reward = torch.tensor([row[0] / 4 for row in rows], dtype=torch.float64)
    group = torch.tensor([row[1] for row in rows])
    names = [row[1] for row in rows]
    alone = torch.tensor([names.count(name) == 1 for name in names])
    plain = ESTIMATORS[estimator](reward, group)
    moved = ESTIMATORS[estimator](reward + shift / 4, group)
    torch.testing.assert_close(moved[~alone], plain[~alone], atol=1e-7, rtol=0)


def test_shift_of_all_rewards_does_not_change_whitened_advantages():
    reward, group, mask = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3), torch.ones(3, 2)
    for estimate in (
        lambda r: advantage.reinforce_plus_plus_baseline(r, group, mask),
        lambda r: advantage.reinforce_plus_plus(advantage.broadcast(r, mask)[:, :1], mask[:, :1]),
        lambda r: advantage.remax(r, torch.full((3,), r[2].item())),
    ):
        torch.testing.assert_close(estimate(reward + 3), estimate(reward), atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_masked_values_have_no_effect(junk):
    generator = torch.Generator().manual_seed(11)
    reward, value = torch.randn(2, 3, 9, generator=generator)
    mask = torch.rand(3, 9, generator=generator) > 0.4
    dirty, dirty_value = reward.masked_fill(~mask, junk), value.masked_fill(~mask, -junk)
    torch.testing.assert_close(
        advantage.reinforce_plus_plus(dirty, mask, gamma=0.9),
        advantage.reinforce_plus_plus(reward, mask, gamma=0.9),
    )
    for got, want in zip(
        advantage.gae(dirty, dirty_value, mask, gamma=0.9, lam=0.8),
        advantage.gae(reward, value, mask, gamma=0.9, lam=0.8),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
        assert (got[~mask] == 0).all()


@given(st.integers(0, 1000))
def test_gae_matches_the_recursion_over_sampled_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 2, 70, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 70, generator=generator) > 0.5
    gain, target = advantage.gae(reward, value, mask, gamma=0.9, lam=0.8)
    for row in range(2):
        running = following = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = reward[row, t] + 0.9 * following - value[row, t]
            running, following = delta + 0.72 * running, value[row, t]
            assert gain[row, t].item() == pytest.approx(float(running), abs=1e-9)
            assert target[row, t].item() == pytest.approx(float(running + following), abs=1e-9)


def _node_ids(parents, fork_lens, lengths):
    """[B][t] the row whose own token it is, and t, as one number."""
    rows = []
    for row, length in enumerate(lengths):
        nodes = []
        for t in range(length):
            owner = row
            while parents[owner] is not None and t < fork_lens[owner]:
                owner = parents[owner]
            nodes.append(owner * 1000 + t)
        rows.append(nodes)
    return rows


def _padded(rows, fill):
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("case", HARD["cases"], ids=lambda case: case["name"])
def test_golden_hard_by_ancestry(case):
    lengths = [len(row) for row in case["responses"]]
    node = _padded(_node_ids(case["parents"], case["fork_lens"], lengths), -1)
    mask = torch.arange(node.shape[1])[None] < torch.tensor(lengths)[:, None]
    got = advantage.arpo_hard(torch.tensor(case["scalar_adv"]), node, mask)
    expected = _padded(case["token_adv_by_ancestry"], 0.0)
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


def test_hard_in_a_nested_tree_and_with_a_masked_tool_token():
    # Row 1 forks from row 0 after 4 tokens, row 2 from row 0 after 2; row 3 shares nothing.
    node = _padded(_node_ids([None, 0, 0, None], [0, 4, 2, 0], [5, 5, 5, 2]), -1)
    mask = node >= 0
    mask[:, 1] = False
    got = advantage.arpo_hard(torch.tensor([1.5, 0.5, -1.0, -1.0]), node, mask)
    third = 1 / 3
    expected = [
        [third, 0, 1.0, 1.0, 1.5],
        [third, 0, 1.0, 1.0, 0.5],
        [third, 0, -1.0, -1.0, -1.0],
        [-1.0, 0, 0, 0, 0],
    ]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_hard_leaves_a_masked_trajectory_out_of_the_mean():
    node = torch.tensor([[7, 1], [7, 2], [7, 3]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    got = advantage.arpo_hard(torch.tensor([2.0, 0.0, -100.0]), node, mask)
    assert got.tolist() == [[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]


@given(st.integers(0, 10_000))
def test_hard_preserves_the_sum_per_token(seed):
    generator = torch.Generator().manual_seed(seed)
    scalar = torch.randn(6, generator=generator)
    node = torch.randint(0, 4, (6, 1), generator=generator)
    mask = torch.ones(6, 1)
    got = advantage.arpo_hard(scalar, node, mask)
    for value in node.unique():
        rows = node[:, 0] == value
        torch.testing.assert_close(got[rows].sum(), scalar[rows].sum(), atol=1e-5, rtol=1e-4)
        assert got[rows].unique().numel() == 1


@given(st.integers(0, 1000))
def test_node_ids_are_labels_only(seed):
    """Close together or as far apart as integers go, negative or not, the means are the same."""
    generator = torch.Generator().manual_seed(seed)
    node = torch.randint(0, 6, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) > 0.3
    scalar = torch.randn(4, generator=generator)
    want = advantage.arpo_hard(scalar, node, mask)
    far = (node - 3) * (2**60)
    for other in (node - 100, far, node.int(), far.masked_fill(~mask, -(2**63))):
        torch.testing.assert_close(advantage.arpo_hard(scalar, other, mask), want)
    assert not advantage.arpo_hard(scalar, node, torch.zeros_like(mask)).any()


def test_remax_by_hand():
    got = advantage.remax(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.5]))
    assert got.tolist() == [0.75, -0.5]


def test_reinforce_plus_plus_reaches_over_tool_tokens():
    # Row 0: return 2 before the tool token and after it; row 1 earns nothing.
    reward = torch.tensor([[0.0, 9.0, 2.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    got = advantage.reinforce_plus_plus(reward, mask)
    white = 1 / (4 / 3) ** 0.5
    torch.testing.assert_close(
        got, torch.tensor([[white, 0, white], [-white, -white, 0]]), atol=1e-5, rtol=1e-5
    )
    discounted = advantage.reinforce_plus_plus(reward, mask, gamma=0.5)
    assert discounted[0, 0] < discounted[0, 2]


def test_reinforce_plus_plus_baseline_is_group_centred_and_white():
    reward = torch.tensor([1.0, 0.0, 5.0, 5.0])
    group = torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 1)
    got = advantage.reinforce_plus_plus_baseline(reward, group, mask)[:, 0]
    white = 0.5 / (0.5 / 3) ** 0.5
    assert got.tolist() == pytest.approx([white, -white, 0, 0], abs=1e-5)


def test_gae_by_hand_and_over_a_tool_token():
    reward = torch.tensor([[0.0, 1.0]])
    value = torch.tensor([[0.5, 0.25]])
    gain, target = advantage.gae(reward, value, torch.ones(1, 2), gamma=0.9, lam=0.8)
    last = 1 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    assert gain[0].tolist() == pytest.approx([first, last])
    assert target[0].tolist() == pytest.approx([first + 0.5, 1.0])
    spread = [torch.tensor([[a, 77.0, b]]) for a, b in (reward[0], value[0])]
    skipped, _ = advantage.gae(*spread, torch.tensor([[1, 0, 1]]), gamma=0.9, lam=0.8)
    assert skipped[0].tolist() == pytest.approx([first, 0.0, last])


def test_bad_input():
    with pytest.raises(ValueError, match=r"reward_B \(2,\), group_B \(3,\)"):
        advantage.grpo(torch.zeros(2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="expected as many rows"):
        advantage.broadcast(torch.zeros(2), torch.ones(3, 4))
    with pytest.raises(ValueError, match="expected 1 axes"):
        advantage.rloo(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"node_BT \(2, 2\), mask_BT \(2, 3\)"):
        advantage.arpo_hard(torch.zeros(2), torch.zeros(2, 2), torch.zeros(2, 3))


def plain_recursion(row, factor):
    out, running = [], 0.0
    for value in reversed(row):
        running = value + factor * running
        out.append(running)
    return out[::-1]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    factor=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    width=st.sampled_from(
        [
            0,
            1,
            2,
            advantage.BLOCK_TOKENS - 1,
            advantage.BLOCK_TOKENS,
            advantage.BLOCK_TOKENS + 1,
            3 * advantage.BLOCK_TOKENS,
        ]
    ),
)
def test_blockwise_is_the_recursion(seed, factor, width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = torch.tensor([plain_recursion(row, factor) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(advantage.discounted_sum(x, factor), want.view(3, width))


def test_discounted_sums_skip_masked_positions():
    x = torch.tensor([[1.0, math.nan, 2.0, 4.0], [math.inf, 8.0, 1.0, math.nan]])
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    total = advantage.apply_to_sampled_tokens(
        lambda row: advantage.discounted_sum(row, 0.5), mask, x
    )
    assert total.tolist() == [[3.0, 0.0, 4.0, 4.0], [0.0, 8.5, 1.0, 0.0]]
    pairs = advantage.apply_to_sampled_tokens(lambda row, other: shift(row, -1) + other, mask, x, x)
    assert pairs.tolist() == [[3.0, 0.0, 6.0, 4.0], [0.0, 9.0, 1.0, 0.0]]


def test_discounted_sums_of_more_rows_than_a_chunk():
    num_rows = ROWS_PER_CHUNK + 3
    x = torch.arange(num_rows, dtype=torch.float64)[:, None].expand(num_rows, 2)
    total = advantage.apply_to_sampled_tokens(
        lambda row: advantage.discounted_sum(row, 1.0), torch.ones(num_rows, 2), x
    )
    assert torch.equal(total[:, 0], 2 * x[:, 0]) and torch.equal(total[:, 1], x[:, 0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_discounted_sums_of_an_empty_batch(shape):
    empty = torch.zeros(shape)
    assert (
        advantage.apply_to_sampled_tokens(
            lambda row: advantage.discounted_sum(row, 0.9), empty, empty
        ).shape
        == shape
    )


def test_shapes_of_discounted_sums_must_agree():
    with pytest.raises(ValueError, match=r"grid_BT \(1, 2\), mask_BT \(1, 3\)"):
        advantage.apply_to_sampled_tokens(lambda row: row, torch.ones(1, 3), torch.ones(1, 2))
