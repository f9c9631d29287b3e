from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.parallel import gloo_collectives
from tests.actor.gloo_ranks import run_ranks

ROWS = (3, 0, 2)


def gather_and_scatter(rank, group):
    """Gather ROWS[r] rows of r + 1 from each rank r, then reduce-scatter 10 * r + target rank."""
    parts = [torch.zeros(rows, 2) for rows in ROWS]
    gloo_collectives.all_gather_uneven(parts, torch.full((ROWS[rank], 2), rank + 1.0), group=group)
    mine = torch.full((ROWS[rank], 2), -1.0)
    shares = [torch.full((rows, 2), 10.0 * rank + to) for to, rows in enumerate(ROWS)]
    gloo_collectives.reduce_scatter_uneven(mine, shares, group=group)
    assert all((share == 10.0 * rank + to).all() for to, share in enumerate(shares))
    return torch.cat(parts), mine


@pytest.fixture(scope="module")
def ranks(rank_pool):
    return run_ranks(rank_pool, gather_and_scatter, 3)


def test_all_ranks_get_all_parts_in_rank_order(ranks):
    expected = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0])[:, None].expand(5, 2)
    for gathered, _ in ranks:
        assert torch.equal(gathered, expected)


def test_each_rank_gets_the_sum_of_its_own_part(ranks):
    # 0 + 10 + 20, and its own number three times over.
    for rank, (_, mine) in enumerate(ranks):
        assert torch.equal(mine, torch.full((ROWS[rank], 2), 30.0 + 3 * rank))
