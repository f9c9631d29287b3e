"""Rows and their values without padding: by hand, and back to the padded form."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.batch.packed_rows import (
    PackedRows,
    PackedScores,
    PackedTargets,
    check_placeholders,
    pack_values,
    unpack_scores,
)
from mega_agentrl.batch.tree_order import shared_between
from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput, PlacedImage
from tests.parallel.reference import make_batch
from tests.train_batches import batch_of_rows, select_rows
from tests.tree_batches import TreeShape, make_tree_batch, tree_shapes


def two_rows():
    """Return a batch whose rows have 8 + 1 and 1 + 12 tokens."""
    return select_rows(make_batch(), [2, 1])


def test_two_rows_are_stored_one_behind_the_other():
    batch = two_rows()
    rows = PackedRows.from_batch(batch)
    assert rows.length_R.tolist() == [9, 13]
    assert rows.response_start_R1.tolist() == [0, 1, 13]
    assert rows.input_length_R.tolist() == [8, 12]
    assert rows.token_N.dtype == np.int32
    first, second = batch.prompt_ids
    response_BT = batch.response_BT.tolist()
    assert rows.token_N.tolist() == [*first, response_BT[0][0], *second, *response_BT[1]]
    longer = rows.with_token_appended()
    assert longer.sequences([0])[0].tolist() == [*rows.sequences([0])[0], 0]
    assert (longer.num_positions, longer.row_R.tolist()) == (13, [0, 1])


def image(name, pixels=None):
    return ImageInput(
        image_id=name, width=28, height=28, grid_thw=(1, 2, 2), merge_size=2, pixels_HWC=pixels
    )


def with_images(batch, *rows):
    return batch.with_fields(
        images_B=tuple(
            tuple(PlacedImage(start=start, image=image(name)) for name, start in row)
            for row in rows
        )
    )


def test_images_stay_with_their_rows():
    # In depth-first order the rows are 1, 0, 2.
    batch = make_tree_batch((TreeShape(prompt_length=4, rows=((None, 0, 3),) * 3),)).with_fields(
        tree_order_B=torch.tensor([1, 0, 2])
    )
    batch = with_images(batch, [("a", 1)], [("a", 1), ("b", 5)], [])
    rows = PackedRows.from_batch(batch)

    def named(rows):
        return [[(part.image.image_id, part.start) for part in row] for row in rows.images_R]

    assert named(rows) == [[("a", 1), ("b", 5)], [("a", 1)], []]
    assert named(rows.take([0, 2])) == [[("a", 1), ("b", 5)], []]
    assert rows.take([2]).images_R is None
    assert named(rows.with_token_appended()) == named(rows)
    parts = [rows.take([1]), rows.take([2]), rows.take([0])]
    merged = PackedRows.merge(parts, rows.row_R, rows.shared_length_R)
    assert named(merged) == named(rows)
    assert PackedRows.from_batch(make_tree_batch()).images_R is None
    with pytest.raises(InputError) as caught:
        replace(rows, images_R=rows.images_R[:2])
    assert caught.value.got["images_R"] == 2


def test_an_image_of_several_rows_travels_once():
    pixels = np.zeros((100, 100, 3), dtype=np.uint8)
    placed = (PlacedImage(start=1, image=image("a", pixels)),)
    batch = make_tree_batch((TreeShape(prompt_length=4, rows=((None, 0, 3),) * 8),))
    rows = PackedRows.from_batch(batch.with_fields(images_B=(placed,) * 8))
    assert len(pickle.dumps(rows)) < 1.5 * pixels.nbytes


def test_shared_tokens_are_stored_once():
    # A prompt of 5, a root of 7, a fork of its first 3 with 6 more, one of that, another root.
    batch = make_tree_batch()
    rows = PackedRows.from_batch(batch)
    assert rows.row_R.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows.length_R.tolist() == [12, 14, 12, 8, 13, 5, 9, 9]
    assert rows.shared_length_R.tolist() == [0, 8, 10, 5, 0, 0, 5, 9]
    assert len(rows.token_N) == 12 + 6 + 2 + 3 + 13 + 5 + 4 + 0
    # The model reads a row without its last token: row 6 needs the one of row 5, row 7 none.
    assert rows.shared_input_length_R.tolist() == [0, 8, 10, 5, 0, 0, 4, 8]
    flat = PackedRows.from_batch(batch, share=False)
    assert flat.shared_length_R.tolist() == [0] * 8
    for whole, shared in zip(flat.sequences(range(8)), rows.sequences(range(8)), strict=True):
        assert whole.tolist() == shared.tolist()


@given(drawn=tree_shapes(), data=st.data())
def test_any_rows_taken_and_merged_have_their_tokens(drawn, data):
    rows = PackedRows.from_batch(make_tree_batch(drawn))
    numbers = range(rows.num_rows)
    left = [index for index in numbers if data.draw(st.booleans())]
    right = [index for index in numbers if index not in left]
    wanted = [index for index in numbers if data.draw(st.booleans())] or [0]
    merged = PackedRows.merge(
        [rows.take(left), rows.take(right)],
        rows.row_R[wanted],
        shared_between(rows.shared_length_R, wanted),
    )
    taken = rows.take(wanted)
    for name in ("row_R", "length_R", "shared_length_R", "prompt_length_R", "token_N"):
        assert getattr(merged, name).tolist() == getattr(taken, name).tolist()
    expected = rows.sequences(wanted)
    for got in (merged, taken.with_token_appended()):
        for tokens, whole in zip(got.sequences(range(len(wanted))), expected, strict=True):
            assert tokens[: len(whole)].tolist() == whole.tolist()


def test_tokens_of_other_lengths_are_refused():
    rows = PackedRows.from_batch(two_rows())
    with pytest.raises(InputError) as caught:
        replace(rows, token_N=rows.token_N[:9])
    assert caught.value.got["token_N"] == 9


def test_targets_are_padded_with_zeros_to_the_width_of_the_batch():
    batch = make_batch()
    row_R = np.array([1, 2, 4])
    targets = PackedTargets.from_batch(batch, row_R, ("old_logp", "value"), batch.advantage_BT)
    assert targets.value_M is targets.advantage_M is None
    inside_RT = torch.arange(12)[None] < batch.length_B[[4, 2], None]
    for name, value_BT in (
        ("mask", batch.mask_BT),
        ("old_logp", batch.old_logp_BT),
        ("kl_weight", batch.advantage_BT),
    ):
        padded_RT = targets.padded(name, [2, 1])
        assert torch.equal(padded_RT, value_BT[[4, 2]] * inside_RT)
        assert padded_RT.dtype == value_BT.dtype


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.randoms(), st.integers(1, 4))
def test_scores_of_any_division_of_the_rows_are_those_of_the_batch(lengths, random, num_parts):
    length_B = torch.tensor(lengths)
    value_BT = torch.rand(len(lengths), 6).masked_fill(torch.arange(6) >= length_B[:, None], 0.0)
    rows = random.sample(range(len(lengths)), len(lengths))
    parts = []
    for number in range(num_parts):
        row_R = np.array(rows[number::num_parts], dtype=np.int64)
        value_M = pack_values(value_BT, row_R, length_B[row_R])
        parts += [None, PackedScores(row_R=row_R, values=(value_M, -value_M))]
    plus_BT, minus_BT = unpack_scores(parts, length_B, 6)
    assert torch.equal(plus_BT, value_BT)
    assert torch.equal(minus_BT, -value_BT)


@pytest.mark.parametrize("numbers", [[0], [0, 1, 1]], ids=["missing", "twice"])
def test_every_row_must_be_answered_once(numbers):
    scores = PackedScores(row_R=np.array(numbers), values=(np.zeros(len(numbers), np.float32),))
    with pytest.raises(AssertionError):
        unpack_scores([scores], torch.ones(2, dtype=torch.int64), 1)


def test_a_row_that_lost_an_image_is_refused():
    # Rows 5 9 9 | 6 9 9 7, with an image of two features in the prompt and one in the response.
    image = ImageInput(
        image_id="a", width=56, height=28, grid_thw=(1, 2, 4), merge_size=2, pixels_HWC=None
    )
    batch = batch_of_rows(torch.tensor([[5, 9, 9, 6, 9, 9, 7]] * 2), 3)
    both = (PlacedImage(start=1, image=image), PlacedImage(start=4, image=image))
    check_placeholders(batch.with_fields(images_B=(both, both)), 9)
    check_placeholders(batch, 8)
    for images_B, row in ((None, 0), ((both, both[:1]), 1)):
        with pytest.raises(InputError) as caught:
            check_placeholders(batch.with_fields(images_B=images_B), 9)
        assert caught.value.name.endswith(f"row {row}")
        assert caught.value.got == 4
