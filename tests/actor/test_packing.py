from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.packing import pack_rows, row_lengths

CPU = torch.device("cpu")


def test_two_rows_by_hand(batch):
    # Row 1: prompt of 1 and response of 12; row 2: prompt of 8 and response of 1.
    select_BT = torch.zeros_like(batch.mask_BT)
    select_BT[1, [0, 11]] = True
    select_BT[2, 0] = True
    micro = pack_rows(batch, [1, 2], select_BT, CPU)
    response = batch.response_BT
    assert micro.start_R == (0, 12, 20)
    assert micro.token_S.tolist() == [
        *batch.prompt_ids[1],
        *response[1, :11].tolist(),
        *batch.prompt_ids[2],
    ]
    assert micro.position_S.tolist() == [*range(12), *range(8)]
    assert micro.predict_N.tolist() == [0, 11, 19]
    assert micro.target_N.tolist() == [response[1, 0], response[1, 11], response[2, 0]]


def test_values_return_to_their_row_and_column_with_gradient(batch):
    micro = pack_rows(batch, [4, 0], batch.mask_BT, CPU)
    value_N = torch.arange(1.0, len(micro.target_N) + 1, requires_grad=True)
    out_RT = micro.to_rows(value_N, batch.response_BT.size(1))
    assert torch.equal(out_RT != 0, batch.mask_BT[[4, 0]])
    out_RT.sum().backward()
    assert torch.equal(value_N.grad, torch.ones_like(value_N))


def test_lengths_are_what_the_model_reads(batch):
    lengths = row_lengths(batch)
    assert lengths == [11, 12, 8, 7, 10, 9]
    for row, length in enumerate(lengths):
        assert len(pack_rows(batch, [row], batch.mask_BT, CPU).token_S) == length


def test_no_rows_is_one_token_that_predicts_nothing(batch):
    micro = pack_rows(batch, [], batch.mask_BT, CPU)
    assert len(micro.token_S) == 1
    assert micro.to_rows(torch.zeros(0), 5).shape == (0, 5)


def test_a_row_without_a_prompt_is_an_error(batch):
    bare = batch.with_fields(prompt_ids=((), *batch.prompt_ids[1:]))
    with pytest.raises(ValueError, match="row 0 has an empty prompt"):
        pack_rows(bare, [0], batch.mask_BT, CPU)
