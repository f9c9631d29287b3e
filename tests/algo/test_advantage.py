"""`algo.advantage`: golden rows, hand-worked cases, permutations, discounted sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo import advantage
from mega_agentrl.algo.masking import ROWS_PER_CHUNK
from tests.algo.golden_values import group_indices, load_golden

GROUPS = load_golden("group_advantages")
HARD = load_golden("hard_advantage")
BLOCK = advantage.BLOCK_TOKENS

ESTIMATORS = {
    "grpo_verl": advantage.grpo,
    "grpo_verl_no_std": lambda r, g: advantage.grpo(r, g, norm_by_std=False),
    "rloo_verl": advantage.rloo,
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", GROUPS["cases"], ids=lambda case: case["name"])
def test_group_advantages_are_those_of_the_reference_implementation(case, estimator):
    got = ESTIMATORS[estimator](torch.tensor(case["rewards"]), group_indices(case["group_ids"]))
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


def test_equal_rewards_of_a_group_give_exactly_zero():
    group = torch.tensor([0, 0, 0, 1, 1])
    assert advantage.grpo(torch.full((5,), 0.1), group).tolist() == [0.0] * 5


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


def _tree_token_ids(parents, fork_lens, lengths):
    """[B][t] the row whose own token it is, and t, as one number."""
    rows = []
    for row, length in enumerate(lengths):
        ids = []
        for t in range(length):
            owner = row
            while parents[owner] is not None and t < fork_lens[owner]:
                owner = parents[owner]
            ids.append(owner * 1000 + t)
        rows.append(ids)
    return rows


def _padded(rows, fill):
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("case", HARD["cases"], ids=lambda case: case["name"])
def test_hard_advantages_are_those_of_the_released_code_by_ancestry(case):
    lengths = [len(row) for row in case["responses"]]
    token = _padded(_tree_token_ids(case["parents"], case["fork_lens"], lengths), -1)
    mask = torch.arange(token.shape[1])[None] < torch.tensor(lengths)[:, None]
    got = advantage.arpo_hard(torch.tensor(case["scalar_adv"]), token, mask)
    expected = _padded(case["token_adv_by_ancestry"], 0.0)
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


def test_hard_averages_over_descendants_in_a_nested_tree_and_skips_tool_tokens():
    # Row 1 forks from row 0 after 4 tokens, row 2 from row 0 after 2; row 3 shares nothing.
    token = _padded(_tree_token_ids([None, 0, 0, None], [0, 4, 2, 0], [5, 5, 5, 2]), -1)
    mask = token >= 0
    mask[:, 1] = False
    got = advantage.arpo_hard(torch.tensor([1.5, 0.5, -1.0, -1.0]), token, mask)
    third = 1 / 3
    expected = [
        [third, 0, 1.0, 1.0, 1.5],
        [third, 0, 1.0, 1.0, 0.5],
        [third, 0, -1.0, -1.0, -1.0],
        [-1.0, 0, 0, 0, 0],
    ]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_hard_leaves_a_masked_trajectory_out_of_the_mean():
    token = torch.tensor([[7, 1], [7, 2], [7, 3]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    got = advantage.arpo_hard(torch.tensor([2.0, 0.0, -100.0]), token, mask)
    assert got.tolist() == [[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]


@given(st.integers(0, 10_000))
def test_hard_preserves_the_sum_per_token_in_more_rows_than_a_chunk(seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = ROWS_PER_CHUNK + 3
    scalar = torch.randn(num_rows, generator=generator)
    token = torch.randint(0, 4, (num_rows, 1), generator=generator)
    got = advantage.arpo_hard(scalar, token, torch.ones(num_rows, 1))
    for value in token.unique():
        rows = token[:, 0] == value
        torch.testing.assert_close(got[rows].sum(), scalar[rows].sum(), atol=1e-5, rtol=1e-4)
        assert got[rows].unique().numel() == 1


@given(st.integers(0, 1000))
def test_node_ids_are_labels_only(seed):
    """Close together or as far apart as integers go, negative or not, the means are the same."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 6, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) > 0.3
    scalar = torch.randn(4, generator=generator)
    want = advantage.arpo_hard(scalar, token, mask)
    far = (token - 3) * (2**60)
    for other in (token - 100, far, token.int(), far.masked_fill(~mask, -(2**63))):
        torch.testing.assert_close(advantage.arpo_hard(scalar, other, mask), want)
    assert not advantage.arpo_hard(scalar, token, torch.zeros_like(mask)).any()


def test_remax_subtracts_the_reward_of_the_greedy_answer():
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


def test_gae_reaches_over_a_tool_token():
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
    width=st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]),
)
def test_blockwise_sums_are_those_of_the_recursion(seed, factor, width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = torch.tensor([plain_recursion(row, factor) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(advantage.discounted_sum(x, factor), want.view(3, width))


def test_discounted_sums_of_more_rows_than_a_chunk_are_those_of_each_row():
    num_rows = ROWS_PER_CHUNK + 3
    x = torch.arange(num_rows, dtype=torch.float64)[:, None].expand(num_rows, 2)
    total = advantage.apply_to_sampled_tokens(
        lambda row: advantage.discounted_sum(row, 1.0), torch.ones(num_rows, 2), x
    )
    assert torch.equal(total[:, 0], 2 * x[:, 0]) and torch.equal(total[:, 1], x[:, 0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_discounted_sums_of_an_empty_batch_are_empty(shape):
    empty = torch.zeros(shape)
    total = advantage.apply_to_sampled_tokens(
        lambda row: advantage.discounted_sum(row, 0.9), empty, empty
    )
    assert total.shape == shape
