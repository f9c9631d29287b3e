"""`algo.egpo`: golden rows, location of the chain of thought, preserved signs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo import advantage
from mega_agentrl.algo.egpo import cot_entropy, cot_mask, egpo, opened_turns
from mega_agentrl.algo.masking import ROWS_PER_CHUNK
from mega_agentrl.errors import InputError
from tests.algo.golden_values import group_indices, load_golden

GOLDEN = load_golden("egpo")
START, END = 151667, 151668


@pytest.mark.parametrize("case", GOLDEN["advantage"], ids=lambda case: case["name"])
def test_advantages_are_those_of_the_reference_implementation(case):
    plain = advantage.grpo(torch.tensor(case["rewards"]), group_indices(case["group_ids"]))
    entropy = torch.tensor(case["cot_entropy"])
    got = egpo(plain, entropy, lam=case["lam"], alpha=case["alpha"])
    assert plain.tolist() == pytest.approx(case["grpo"], abs=1e-5)
    assert got.tolist() == pytest.approx(case["egpo"], abs=1e-5)
    bonus = egpo(plain, entropy, lam=1.0, alpha=case["alpha"]) - plain
    assert bonus.tolist() == pytest.approx(case["bonus"], abs=1e-5)


@pytest.mark.parametrize("case", GOLDEN["cot_mask"], ids=lambda case: case["name"])
def test_masks_are_those_of_the_reference_implementation(case):
    token = torch.tensor([case["ids"]])
    mask = torch.arange(token.shape[1])[None] < case["response_len"]
    got = cot_mask(token, mask, start_id=START, end_id=END)
    num = case["response_len"]
    assert got[0, :num].int().tolist() == case["mask"][:num] and not got[0, num:].any()
    entropy = torch.full(token.shape, math.nan)
    entropy[0, : len(case["token_entropy"])] = torch.tensor(case["token_entropy"])
    assert cot_entropy(entropy, got).item() == pytest.approx(case["H"], abs=1e-6)


def test_the_defaults_are_those_of_the_paper():
    assert egpo(torch.tensor([1.5, -0.5]), torch.full((2,), 5.0)).tolist() == pytest.approx(
        [1.5 + 0.4 * 0.75, -0.5 + 0.4 * 0.25]
    )


def mask_of(token, mask, **options):
    got = cot_mask(torch.tensor([token]), torch.tensor([mask]), **options)
    return got[0].int().tolist()


def test_markers_may_have_several_tokens():
    token = [1, 2, 5, 1, 3, 6, 3, 4, 7]  # <1 2> opens, <3 4> closes; 1 and 3 alone mean nothing
    marks = {"start_id": (1, 2), "end_id": (3, 4)}
    assert mask_of(token, [1] * 9, **marks) == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert mask_of(token[2:], [1] * 7, **marks) == [1, 1, 1, 1, 0, 0, 0]
    assert mask_of([1, 5, 2], [1] * 3, **marks) == [0, 0, 0]
    # A marker of which a tool wrote a part is none; one that overlaps itself starts first.
    assert mask_of([1, 2, 5], [0, 1, 1], **marks) == [0, 0, 0]
    assert mask_of([8, 8, 8, 9], [1] * 4, start_id=(8, 8), end_id=9) == [0, 0, 1, 0]
    # The close must lie wholly behind the opening.
    overlap = mask_of([1, 2, 2, 3, 2, 2], [1] * 6, start_id=(1, 2), end_id=(2, 2))
    assert overlap == [0, 0, 1, 1, 0, 0]


def test_the_first_block_may_continue_after_a_tool_answer():
    token, mask = [START, 5, END, START, 6, END, 7], [1, 1, 0, 0, 1, 1, 1]
    assert mask_of(token, mask, start_id=START, end_id=END) == [0, 1, 0, 0, 1, 0, 0]


def test_with_all_blocks_the_rule_applies_to_each_turn():
    # Complete; opened by the template; never closed; without any; empty.
    token = [START, 5, END, 7, 90, 5, END, 7, 90, START, 6, 90, 5, 7, 90, START, END, 7]
    mask = [1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1]
    marks = {"start_id": START, "end_id": END}
    assert mask_of(token, mask, **marks) == [0, 1] + [0] * 16
    want = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert mask_of(token, mask, **marks, blocks="all") == want


def opened(token, mask, start_id=START, end_id=END):
    got = opened_turns(
        torch.tensor([token]), torch.tensor([mask]), start_id=start_id, end_id=end_id
    )
    return got[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("token", "mask", "turns"),
    [
        pytest.param([7, START, 10, 5, 6], [0, 0, 0, 1, 1], [3], id="start and line break"),
        pytest.param([7, START, 5, 6], [0, 0, 1, 1], [2], id="start alone"),
        pytest.param([START, 10, 11, 5], [0, 0, 0, 1], [3], id="two tokens behind"),
        pytest.param([START, 10, 11, 12, 5], [0, 0, 0, 0, 1], [], id="further away"),
        pytest.param([START, END, 5], [0, 0, 1], [], id="closed at once"),
        pytest.param([START, 10, END, 5], [0, 0, 0, 1], [], id="closed"),
        pytest.param([7, START, 10, 5], [0, 1, 1, 1], [], id="by the policy"),
        pytest.param(
            [START, 10, 5, 90, START, 10, 6, 90, 6], [0, 0, 1, 0, 0, 0, 1, 0, 1], [2, 6], id="turns"
        ),
    ],
)
def test_the_generation_prompt_opens_the_block_of_a_turn(token, mask, turns):
    assert opened(token, mask) == turns


def test_the_generation_prompt_opens_with_a_marker_of_several_tokens():
    marks = {"start_id": (1, 2), "end_id": (3, 4)}
    assert opened([9, 1, 2, 10, 5], [0, 0, 0, 0, 1], **marks) == [4]
    assert opened([9, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1], **marks) == []
    assert opened([9, 1, 5, 2], [0, 0, 1, 1], **marks) == []


@pytest.mark.parametrize(
    ("token", "want"),
    [
        pytest.param([5, 6, 7, 8], [1, 1, 1, 1], id="cut off"),
        pytest.param([5, 6, END, 8], [1, 1, 0, 0], id="closed"),
        pytest.param([END, 6, 7, 8], [0, 0, 0, 0], id="empty"),
        pytest.param([START, 6, END, 8], [0, 1, 0, 0], id="opened again"),
        pytest.param([5, END, START, 8], [1, 0, 0, 0], id="second block"),
    ],
)
@pytest.mark.parametrize("blocks", ["first", "all"])
def test_an_open_block_begins_with_the_turn(token, want, blocks):
    marks = {"start_id": START, "end_id": END, "blocks": blocks}
    is_opened = torch.tensor([[True, False, False, False]])
    assert mask_of(token, [1] * 4, **marks, opened_BT=is_opened) == want


def test_with_all_blocks_each_turn_is_open_or_not_on_its_own():
    token, mask = [5, END, 7, 90, 6, 7, 90, 8], [1, 1, 1, 0, 1, 1, 0, 1]
    marks = {"start_id": START, "end_id": END}
    is_opened = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 0]]).bool()
    assert mask_of(token, mask, **marks, opened_BT=is_opened) == [1, 0, 0, 0, 0, 0, 0, 0]
    want = [1, 0, 0, 0, 1, 1, 0, 0]
    assert mask_of(token, mask, **marks, opened_BT=is_opened, blocks="all") == want


@pytest.mark.parametrize("blocks", ["first", "all"])
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([START, END, 5, 6]), st.booleans(), st.integers(0, END)),
        min_size=1,
        max_size=14,
    )
)
def test_masked_tokens_and_other_rows_have_no_effect(blocks, rows):
    token = torch.tensor([[row[0] for row in rows]])
    mask = torch.tensor([[row[1] for row in rows]])
    other = torch.where(mask, token, torch.tensor([[row[2] for row in rows]]))
    marks = {"start_id": START, "end_id": END, "blocks": blocks}
    plain = cot_mask(token, mask, **marks)
    assert torch.equal(plain, cot_mask(other, mask, **marks))
    assert not (plain & ~mask).any()
    stack = torch.cat([other.flip(1), token])
    assert torch.equal(cot_mask(stack, torch.cat([mask.flip(1), mask]), **marks)[1:], plain)


def test_cot_masks_of_more_rows_than_a_chunk_are_those_of_each_row():
    num = ROWS_PER_CHUNK + 5
    token = torch.full((num, 4), 5)
    token[torch.arange(num), torch.arange(num) % 4] = END
    got = cot_mask(token, torch.ones_like(token), start_id=START, end_id=END)
    assert got.sum(1).tolist() == [row % 4 for row in range(num)]


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 20)), min_size=1, max_size=8),
    st.floats(0.01, 1.9),
)
def test_bonus_keeps_signs_and_is_bounded(rows, lam):
    plain = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    entropy = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    got = egpo(plain, entropy, lam=lam, alpha=2.0)
    assert torch.equal(got.sign(), plain.sign())
    assert (got >= plain).all() and (got - plain <= lam * plain.abs() / 2 + 1e-12).all()


GRID = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("call", "name", "got"),
    [
        pytest.param(lambda: cot_entropy(None, GRID), "entropy_BT", None, id="no entropies"),
        pytest.param(
            lambda: cot_entropy(torch.tensor([[1.0, math.nan], [1.0, 1.0]]), torch.ones(2, 2)),
            "entropy_BT",
            "values that are not finite in 1 of 2 chains of thought",
            id="entropies that are not finite",
        ),
        pytest.param(
            lambda: cot_mask(GRID, GRID, start_id=(), end_id=2), "start_id", (), id="empty marker"
        ),
        pytest.param(
            lambda: cot_mask(GRID, GRID, start_id=1, end_id=2, blocks="some"),
            "blocks",
            "some",
            id="blocks",
        ),
        pytest.param(lambda: egpo(GRID[0], GRID[0], alpha=0), "alpha", 0, id="alpha"),
        pytest.param(lambda: egpo(GRID[0], GRID[0], lam=-1), "lam", -1, id="lam"),
    ],
)
def test_bad_input_is_refused(call, name, got):
    with pytest.raises(InputError) as caught:
        call()
    assert (caught.value.name, caught.value.got) == (name, got)
