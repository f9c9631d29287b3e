"""The checksum sees every kind of accident it is there for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.digest import digest


def some_bytes(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.manual_seed(seed), dtype=torch.uint8)


def test_one_word_by_hand():
    # Row 0 and column 0 have factor 1; the length 8 is multiplied by the golden constant.
    data = torch.tensor([3], dtype=torch.int64).view(torch.uint8)
    expected = (3 + 8 * 0x9E3779B97F4A7C15) % 2**64
    assert digest(data) % 2**64 == expected


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 20_000), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_shows(count, place, bit):
    data = some_bytes(count)
    flipped = data.clone()
    flipped[place % count] ^= 1 << bit
    assert digest(data) != digest(flipped)


def test_swapped_words_rows_and_shifts_show():
    data = some_bytes(8192 * 3)
    words = data.clone().view(torch.int64)
    words[[5, 6]] = words[[6, 5]]
    rows = data.clone().view(3, 8192)[[1, 0, 2]].reshape(-1)
    digests = [digest(d) for d in (data, words.view(torch.uint8), rows, data.roll(8))]
    assert len(set(digests)) == 4


def test_trailing_zeros_count():
    data = some_bytes(100)
    assert digest(data) != digest(torch.cat([data, torch.zeros(1, dtype=torch.uint8)]))


def test_a_view_at_any_offset_gives_the_same_number():
    data = some_bytes(9000)
    assert digest(data[3:8500]) == digest(data[3:8500].clone())


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="expected flat uint8"):
        digest(torch.zeros(4))
