"""Cut prompts: by hand, and what holds for every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import Truncation
from mega_agentrl.data.encoding.truncation import num_generation_prompt_tokens, truncate_tokens

CUTS = (Truncation.left, Truncation.right, Truncation.middle)


def test_by_hand():
    ids = (0, 1, 2, 3, 4, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.left) == (2, 3, 4, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.right) == (0, 1, 2, 3, 4, 90, 91)
    assert truncate_tokens(ids, 2, 7, Truncation.middle) == (0, 1, 2, 5, 6, 90, 91)
    assert truncate_tokens(ids, 2, 3, Truncation.middle) == (0, 90, 91)
    assert truncate_tokens(ids, 0, 2, Truncation.middle) == (0, 91)


def test_the_generation_prompt_is_what_is_behind():
    assert num_generation_prompt_tokens([1, 2, 3, 8, 9], [1, 2, 3]) == 2
    assert num_generation_prompt_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert (
        num_generation_prompt_tokens([1, 2, 8, 9], [1, 2, 7]) == 2
    )  # a template that ends a turn otherwise


def test_no_room_and_no_cut_are_errors():
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=2: expected more than the 2"):
        truncate_tokens((1, 2, 3, 4), 2, 2, Truncation.left)
    with pytest.raises(ValueError, match=r"data\.truncation=drop: expected left"):
        truncate_tokens((1, 2, 3, 4), 1, 2, Truncation.drop)


@given(st.integers(0, 40), st.integers(0, 5), st.integers(6, 30), st.sampled_from(CUTS))
def test_every_cut_is_as_long_as_it_may_be_in_order_and_ends_alike(size, num_last, limit, where):
    ids = tuple(range(size + num_last))
    kept = truncate_tokens(ids, num_last, limit, where)
    assert len(kept) == min(len(ids), limit)
    assert list(kept) == sorted(kept)
    assert kept[len(kept) - num_last :] == ids[len(ids) - num_last :]
