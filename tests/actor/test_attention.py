from __future__ import annotations

import torch

from mega_agentrl.actor.attention import PackedRotary, PackedRows, _pad, attend


def test_packed_rows_attend_like_each_row_alone():
    generator = torch.Generator().manual_seed(0)
    starts = (0, 3, 4, 9)
    position = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4])
    query = torch.randn(9, 1, 4, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(9, 1, 2, 8, generator=generator) for _ in range(2))
    got = attend(query, key, value, PackedRows.of(starts, position))
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        q, k, v = (part[start:stop, 0].transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(2, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / 8**0.5
        causal = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        expected = (weights @ v).transpose(0, 1).reshape(stop - start, 1, 32)
        torch.testing.assert_close(got[start:stop], expected)
    # What one row answers depends on no other row.
    got[4:].sum().backward()
    assert query.grad[:4].abs().max() == 0


def test_padding_puts_rows_side_by_side():
    rows = PackedRows.of((0, 1, 3), torch.tensor([0, 0, 1]))
    padded = _pad(torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1, 1), rows)
    assert padded.flatten().tolist() == [5, 0, 6, 7]


def test_angles_follow_the_position_not_the_place():
    rotary = PackedRotary(4, 100.0)
    angle = rotary(torch.tensor([0, 1, 0, 2]))[:, 0, 0]
    assert torch.equal(angle[0], angle[2])
    torch.testing.assert_close(angle[3], torch.tensor([2.0, 0.2, 2.0, 0.2]))
