from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.batch.minibatches import minibatch_masks, minibatch_row_lengths
from mega_agentrl.batch.weight_probe import probe_batch


def test_five_rows_in_two_steps_by_hand():
    mask_BT = torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0], [1, 1]])
    first, second = minibatch_masks(mask_BT, 2)
    assert first.tolist() == [[1, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    assert second.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert first.dtype == torch.bool


def test_lengths_are_those_of_rows_that_are_trained_on():
    given = probe_batch([7, 1, 2, 3], 4)  # a prompt of one token and a response of three
    mask_BT = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1]]).bool()
    given = given.with_fields(
        mask_BT=mask_BT,
        prompt_ids=((1,), (1,), (1, 2, 3), (1,)),
        length_B=torch.tensor([3, 3, 3, 1]),
    )
    assert minibatch_row_lengths(given, 2) == [[3], [5, 1]]
    assert minibatch_row_lengths(given, 1) == [[3, 5, 1]]


@settings(deadline=None)
@given(num_rows=st.integers(1, 9), num_steps=st.integers(1, 12))
def test_every_token_is_trained_on_once(num_rows, num_steps):
    mask_BT = torch.arange(num_rows * 3).reshape(num_rows, 3) % 2 == 0
    masks = list(minibatch_masks(mask_BT, num_steps))
    assert len(masks) == min(num_steps, num_rows)
    assert torch.equal(sum(mask.int() for mask in masks), mask_BT.int())
    # Even: the numbers of rows differ by at most one.
    whole = [mask.any(dim=1).sum().item() for mask in minibatch_masks(torch.ones(num_rows, 1), 3)]
    assert max(whole) - min(whole) <= 1


def test_an_empty_batch_is_one_empty_step():
    (mask_BT,) = minibatch_masks(torch.zeros(0, 4), 2)
    assert mask_BT.shape == (0, 4)
