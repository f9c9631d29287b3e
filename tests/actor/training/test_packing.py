"""Rows packed for the model, whole and divided over context ranks, by hand and by property."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.batch.packed_rows import PackedRows
from tests.rank_shards import pack_rows

CPU = torch.device("cpu")


def test_two_rows_are_packed_one_behind_the_other(batch):
    # Row 1: prompt of 1 and response of 12; row 2: prompt of 8 and response of 1.
    select_BT = torch.zeros_like(batch.mask_BT)
    select_BT[1, [0, 11]] = True
    select_BT[2, 0] = True
    micro = pack_rows(batch, [1, 2], select_BT, CPU)
    response = batch.response_BT
    assert micro.start_G == (0, 12, 20)
    assert micro.token_S.tolist() == [
        *batch.prompt_ids[1],
        *response[1, :11].tolist(),
        *batch.prompt_ids[2],
    ]
    assert micro.position_S.tolist() == [*range(12), *range(8)]
    assert micro.predict_N.tolist() == [0, 11, 19]
    assert micro.target_N.tolist() == [response[1, 0], response[1, 11], response[2, 0]]


def test_lengths_are_those_of_the_packed_rows(batch):
    lengths = PackedRows.from_batch(batch).input_length_R.tolist()
    assert lengths == [11, 12, 8, 7, 10, 9]
    for row, length in enumerate(lengths):
        assert len(pack_rows(batch, [row], batch.mask_BT, CPU).token_S) == length


def test_no_rows_are_one_token_that_predicts_nothing(batch):
    micro = pack_rows(batch, [], batch.mask_BT, CPU)
    assert len(micro.token_S) == 1
    assert micro.to_rows(torch.zeros(0), 5).shape == (0, 5)


def test_padding_for_the_tensor_ranks_is_a_row_at_the_end(batch):
    plain = pack_rows(batch, [1, 3], batch.mask_BT, CPU)
    micro = pack_rows(batch, [1, 3], batch.mask_BT, CPU, multiple=8)
    # 12 and 7 tokens, and 5 to make 24.
    assert plain.start_G == (0, 12, 19)
    assert micro.start_G == (0, 12, 19, 24)
    assert torch.equal(micro.token_S[:19], plain.token_S)
    assert micro.token_S[19:].tolist() == [0] * 5
    assert micro.position_S[19:].tolist() == [0, 1, 2, 3, 4]
    for name in ("predict_N", "target_N", "row_K", "column_K"):
        assert torch.equal(getattr(micro, name), getattr(plain, name))
    assert pack_rows(batch, [1], batch.mask_BT, CPU, multiple=4).start_G == (0, 12)
    assert pack_rows(batch, [], batch.mask_BT, CPU, multiple=4).start_G == (0, 4)


@pytest.mark.parametrize("rows", [[], [0], [1, 2, 3, 5]], ids=["none", "one", "four"])
@pytest.mark.parametrize("multiple", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_the_micro_batch(batch, rows, multiple, size):
    whole = pack_rows(batch, rows, batch.mask_BT, CPU)
    options = {"multiple": multiple, "context_size": size}
    parts = [
        pack_rows(batch, rows, batch.mask_BT, CPU, context_rank=rank, **options)
        for rank in range(size)
    ]
    assert len({part.start_G for part in parts}) == 1
    assert {len(part.token_S) for part in parts} == {parts[0].start_G[-1] // size}
    assert len(parts[0].token_S) % multiple == 0
    assert parts[0].start_G[-1] - len(whole.token_S) < 2 * size * (len(rows) + multiple)
    # The parts of all ranks add up to the whole, and each target has the same token before it.
    width = batch.response_BT.size(1)
    for name in ("target_N", "predict_N"):

        def values(micro, name=name):
            value_N = getattr(micro, name)
            value_N = micro.token_S[value_N] if name == "predict_N" else value_N
            return micro.to_rows(value_N + 1, width)

        assert torch.equal(sum(values(part) for part in parts), values(whole))


def test_a_row_without_a_prompt_is_an_error(batch):
    bare = batch.with_fields(prompt_ids=((), *batch.prompt_ids[1:]))
    with pytest.raises(ValueError):
        pack_rows(bare, [0], batch.mask_BT, CPU)
