"""The split of trees by hand and as a partition; the all-gather between real processes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.parallel.context_parallel import (
    all_gather_tokens,
    gathered_token_indices,
    rank_token_indices,
    tree_length_multiple,
)
from tests.actor.gloo_ranks import run_ranks


def test_each_of_two_ranks_has_the_first_and_last_or_the_middle_quarters():
    # Trees of 4 and 8 in quarters: rank 0 has the outer two, rank 1 the inner two.
    start_G = (0, 4, 12)
    assert rank_token_indices(start_G, 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert rank_token_indices(start_G, 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    assert gathered_token_indices(start_G, 2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


@given(size=st.integers(2, 5), chunks=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_ranks_share_tokens_and_scores_evenly(size, chunks):
    start_G = [0]
    for chunk in chunks:
        start_G.append(start_G[-1] + chunk * tree_length_multiple(size))
    held = [rank_token_indices(start_G, rank, size) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(start_G[-1]))
    assert len({len(part) for part in held}) == 1
    position_W = torch.cat([torch.arange(chunk * tree_length_multiple(size)) for chunk in chunks])
    assert len({int(position_W[part].sum()) for part in held}) == 1
    assert torch.equal(
        torch.cat(held)[gathered_token_indices(start_G, size)], torch.arange(start_G[-1])
    )


def exchange(rank, group):
    value_S = (10.0 * rank + torch.arange(3.0))[:, None].requires_grad_()
    gathered_W = all_gather_tokens(value_S, group)
    # Rank r weighs gathered token w with (r + 1) * w.
    ((rank + 1) * torch.arange(6.0)[:, None] * gathered_W).sum().backward()
    return gathered_W.flatten().tolist(), value_S.grad.flatten().tolist()


def test_all_ranks_gather_all_tokens_and_their_gradients_add_up(rank_pool):
    results = run_ranks(rank_pool, exchange, 2)
    assert [gathered for gathered, _ in results] == 2 * [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]]
    assert [grad for _, grad in results] == [[0.0, 3.0, 6.0], [9.0, 12.0, 15.0]]
