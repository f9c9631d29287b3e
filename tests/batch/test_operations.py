"""Batches taken apart and put together again: by hand, back and forth, and what is refused."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.batch.operations import (
    chunk,
    concatenate,
    merge_chunks,
    pad_response_length,
    pad_rows,
    rename_field,
    repeat,
    select_fields,
    slice_rows,
    union_fields,
)
from mega_agentrl.types.batch import TrainBatch


def batch(rows=3, width=4, first=0, **changes):
    """Rows that differ; the last position of odd rows is padding, two rows are a group."""
    grid = torch.arange(rows * width).reshape(rows, width) + first
    odd_B = torch.arange(rows) % 2
    length_B = width - odd_B
    node_BT = torch.where(torch.arange(width)[None, :] < length_B[:, None], grid - first, -1)
    values = {
        "prompt_ids": tuple((first + row,) for row in range(rows)),
        "response_BT": grid,
        "length_B": length_B,
        "mask_BT": node_BT >= 0,
        "group_B": torch.arange(rows) // 2,
        "reward_B": torch.arange(rows).float(),
        "node_BT": node_BT,
        "rollout_logp_BT": -grid.float(),
        "rollout_entropy_BT": grid.float(),
        "version_BT": torch.ones(rows, width, dtype=torch.int64),
    }
    return TrainBatch(**(values | changes))


def same(one, other):
    for spec in fields(TrainBatch):
        value, expected = getattr(one, spec.name), getattr(other, spec.name)
        if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
            assert torch.equal(value, expected), spec.name
            assert value.dtype == expected.dtype, spec.name
        else:
            assert value == expected, spec.name
    return True


GRID = torch.full((3, 4), 0.5)


def test_fields_are_selected_renamed_and_united():
    full = batch(old_logp_BT=GRID, advantage_BT=GRID + 1)
    assert same(select_fields(full, ["advantage_BT"]), batch(advantage_BT=GRID + 1))
    assert same(select_fields(full, []), batch())
    assert same(
        rename_field(batch(old_logp_BT=GRID), "old_logp_BT", "ref_logp_BT"), batch(ref_logp_BT=GRID)
    )
    assert same(union_fields(batch(old_logp_BT=GRID), batch(advantage_BT=GRID + 1)), full)
    assert same(union_fields(full, full), full)


def test_rows_of_two_batches_are_other_prompts_and_tokens():
    both = concatenate([batch(3, 4), batch(2, 5, first=50)])
    assert both.group_B.tolist() == [0, 0, 1, 2, 2]
    assert both.response_BT[0].tolist() == [0, 1, 2, 3, 0]
    assert both.response_BT[3].tolist() == [50, 51, 52, 53, 54]
    assert both.node_BT[1].tolist() == [4, 5, 6, -1, -1]
    assert both.node_BT[3].tolist() == [12, 13, 14, 15, 16]
    assert both.length_B.tolist() == [4, 3, 4, 5, 4]
    assert both.trajectory_B is None
    parts = batch(3, 4, trajectory_B=torch.tensor([0, 0, 1]))
    assert concatenate([parts, batch(2)]).trajectory_B.tolist() == [0, 0, 1, 2, 3]


def test_copies_are_one_group_and_their_own_trajectories():
    twice = repeat(batch(trajectory_B=torch.tensor([0, 0, 1])), 2)
    assert twice.prompt_ids == ((0,), (0,), (1,), (1,), (2,), (2,))
    assert twice.group_B.tolist() == [0, 0, 0, 0, 1, 1]
    assert twice.trajectory_B.tolist() == [0, 1, 0, 1, 2, 3]
    assert same(repeat(batch(), 1), batch())


def test_padding_counts_for_nothing_and_comes_off_again():
    wide = pad_response_length(batch(advantage_BT=GRID), 6)
    assert wide.response_BT.shape == (3, 6)
    assert (wide.mask_BT.sum(), wide.advantage_BT.sum()) == (batch().mask_BT.sum(), GRID.sum())
    assert wide.node_BT[:, 4:].eq(-1).all()
    tall = pad_rows(batch(), 4)
    assert tall.group_B.tolist() == [0, 0, 1, 2]
    assert (tall.mask_BT.sum(), tall.reward_B.tolist()) == (batch().mask_BT.sum(), [0, 1, 2, 0])
    assert same(tall.select_rows(range(3)), batch())
    assert same(pad_rows(batch(), 3), batch())


@given(st.integers(1, 9), st.data())
def test_chunks_come_back_as_they_were(rows, data):
    whole = batch(rows)
    number = data.draw(st.integers(1, rows))
    chunks = chunk(whole, number)
    assert {one.num_rows for one in chunks} <= {rows // number, -(-rows // number)}
    assert same(merge_chunks(chunks), whole)
    order = data.draw(st.permutations(range(rows)))
    held = [order[at::number] for at in range(number)]
    assert same(merge_chunks([whole.select_rows(part) for part in held], held), whole)


def test_slices():
    assert same(slice_rows(batch(), 1, 3), batch().select_rows([1, 2]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward_B": torch.zeros(3, dtype=torch.int64)}, "reward_B is torch.int64, expected a fl"),
        ({"group_B": torch.zeros(3)}, "group_B is torch.float32, expected torch.int64"),
        ({"mask_BT": torch.zeros(3, 4)}, "mask_BT is torch.float32, expected torch.bool"),
        ({"length_B": torch.tensor([4, 4, 5])}, r"length_B has \[4, 4, 5\], expected 0 to 4"),
        ({"mask_BT": torch.ones(3, 4).bool()}, "mask_BT is set beyond length_B"),
        (
            {"trajectory_B": torch.tensor([0, 1, 1])},
            "trajectory_B has 1 in row 2 of group_B 1, expected tr",
        ),
    ],
)
def test_what_does_not_belong_together_is_named(changes, expected):
    operations = (
        TrainBatch.validate,
        lambda bad: bad.select_rows(range(3)),
        lambda bad: select_fields(bad, _optional(bad)),
        lambda bad: pad_rows(bad, 2),
    )
    for operation in operations:
        with pytest.raises(ValueError, match=expected):
            operation(batch(**changes))


def _optional(one):
    return [] if one.trajectory_B is None else ["trajectory_B"]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (
            lambda: select_fields(batch(), ["value_BT"]),
            "select_fields: value_BT is not in the batch",
        ),
        (lambda: slice_rows(batch(), 2, 2), "slice_rows: rows 2 to 2 of a batch of 3"),
        (lambda: concatenate([]), "concatenate: got no batch"),
        (lambda: concatenate([batch(), batch(value_BT=GRID)]), "value_BT is in batch 0 or in ba"),
        (
            lambda: concatenate([batch(value_BT=GRID), batch(value_BT=GRID.double())]),
            "value_BT of batch 1 is torch.float64, expected torch.float32",
        ),
        (lambda: union_fields(batch(), batch(first=1)), "union_fields: prompt_ids differ"),
        (
            lambda: union_fields(batch(), batch(reward_B=torch.ones(3))),
            "union_fields: reward_B differs",
        ),
        (
            lambda: rename_field(batch(), "old_logp_BT", "ref_logp_BT"),
            "old_logp_BT is not in the batch",
        ),
        (
            lambda: rename_field(batch(), "reward_B", "value_BT"),
            "rename_field: 'reward_B', expected one of old_l",
        ),
        (
            lambda: rename_field(batch(old_logp_BT=GRID, value_BT=GRID), "old_logp_BT", "value_BT"),
            "value_BT is in the batch",
        ),
        (lambda: repeat(batch(), 0), "repeat: number=0"),
        (
            lambda: pad_response_length(batch(), 3),
            "pad_response_length: width=3, expected at least 4",
        ),
        (lambda: pad_rows(batch(), 0), "pad_rows: multiple=0"),
        (lambda: chunk(batch(), 4), "chunk: number=4, expected 1 to 3"),
        (lambda: merge_chunks([]), "merge_chunks: got no chunk"),
        (lambda: merge_chunks([batch()], [[0, 1, 1]]), "expected each row of the whole once"),
        (
            lambda: merge_chunks([batch(), batch()], [[0, 1], [2, 3, 4, 5]]),
            r"chunks of \[3, 3\] rows",
        ),
    ],
)
def test_what_cannot_be_done_says_why(operation, expected):
    with pytest.raises(ValueError, match=expected):
        operation()
