"""Both plans against the definition: a token sees exactly the tokens of its path up to itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.actor.model.attention_plan import (
    AttentionSegment,
    Branch,
    group_by_size,
    make_padded_plan,
    make_varlen_plan,
)
from mega_agentrl.actor.parallel.context_parallel import (
    gathered_token_indices,
    rank_token_indices,
    tree_length_multiple,
)
from tests.rank_shards import pack_rows
from tests.tree_batches import make_tree_batch, paths_of, single_branches, tree_shapes

CPU = torch.device("cpu")


def square(length):
    return AttentionSegment(query_start=0, num_queries=length, key_runs=((0, length),))


def test_a_context_rank_sees_the_keys_before_its_quarters_of_each_row():
    plan = make_varlen_plan((0, 4, 12), single_branches((0, 4, 12)), 1, 2, CPU)
    # Quarters 1 and 2 of the rows see the first 2, 3, 4 and 6 tokens of theirs.
    assert plan.cu_seqlens_q.tolist() == [0, 1, 2, 4, 6]
    assert plan.cu_seqlens_k.tolist() == [0, 2, 5, 9, 15]
    assert (plan.max_seqlen_q, plan.max_seqlen_k) == (2, 6)
    assert plan.cu_seqlens_q.dtype == torch.int32
    order = gathered_token_indices((0, 4, 12), 2)
    tokens = [0, 1, 0, 1, 2, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9]
    assert plan.key_index_K.tolist() == order[tokens].tolist()


def test_a_fork_sees_its_own_keys_and_those_before_it():
    # Three tokens, of which a branch of two leaves the last; the second tree is one token.
    branches = (
        Branch(start=0, stop=3, path=()),
        Branch(start=3, stop=5, path=((0, 2),)),
        Branch(start=5, stop=6, path=()),
    )
    plan = make_varlen_plan((0, 5, 6), branches, 0, 1, CPU)
    assert plan.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert plan.cu_seqlens_k.tolist() == [0, 3, 7, 8]
    assert plan.key_index_K.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert (plan.max_seqlen_q, plan.max_seqlen_k) == (3, 4)
    flat = make_varlen_plan((0, 5, 6), single_branches((0, 5, 6)), 0, 1, CPU)
    assert flat.key_index_K is None


def test_a_long_row_does_not_pad_the_short_ones():
    # 2000 alone: with one row of 1000 beside it 3/5 of the work would be padding; 900 beside 1000
    # is a ninth. Rows of less than 181 cost less than a block's start.
    groups = group_by_size([square(length) for length in (10, 2000, 1000, 40, 900, 1)])
    sizes = [[part.num_keys for part in group] for group in groups]
    assert sizes == [[2000], [1000, 900], [40, 10, 1]]


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_padding_costs_at_most_an_eighth_of_the_work(lengths):
    groups = group_by_size([square(length) for length in lengths])
    assert sorted(part.num_keys for group in groups for part in group) == sorted(lengths)
    for group in groups:
        work = sum(part.num_keys**2 for part in group)
        area = len(group) * max(part.num_keys for part in group) ** 2
        assert area <= max(1.125 * work, work + 32_768)
    # A group's longest row is more than sqrt(1.125) times the next one's: 48 groups down to 181.
    assert len(groups) <= 50


def attended_in_blocks(plan, size):
    """Return {(query, gathered key)} over the real query slots."""
    pairs, query_at, key_at = set(), 0, 0
    real = set(plan.slot_index_S.tolist())
    for block in plan.blocks:
        shape, bias = (block.num_queries, block.num_keys), block.bias(torch.float32)
        for index in range(block.num_segments):
            mask = torch.ones(shape).tril() if bias is None else bias[index, 0] == 0
            for query, key in torch.nonzero(mask).tolist():
                if query_at + query in real:
                    token = plan.query_index_P[query_at + query]
                    pairs.add((int(token), int(plan.key_index_K[key_at + key])))
            query_at, key_at = query_at + shape[0], key_at + shape[1]
    assert (query_at, key_at) == (len(plan.query_index_P), len(plan.key_index_K))
    return pairs


def attended_in_runs(plan):
    pairs = set()
    for number in range(len(plan.cu_seqlens_q) - 1):
        first, last = plan.cu_seqlens_q[number : number + 2].tolist()
        start, stop = plan.cu_seqlens_k[number : number + 2].tolist()
        for query in range(first, last):
            for key in range(start, stop - (last - 1 - query)):
                pairs.add((query, key if plan.key_index_K is None else int(plan.key_index_K[key])))
    return pairs


@settings(max_examples=40)
@given(trees=tree_shapes(), size=st.integers(1, 3), data=st.data())
def test_in_both_plans_a_token_attends_to_its_path_up_to_itself(trees, size, data):
    rank = data.draw(st.integers(0, size - 1))
    batch = make_tree_batch(trees)
    micro = pack_rows(
        batch, range(batch.num_rows), batch.mask_BT, CPU, context_rank=rank, context_size=size
    )
    start_G, branches = micro.start_G, micro.branches
    assert all(start % tree_length_multiple(size) == 0 for start in start_G)
    place_W, paths = gathered_token_indices(start_G, size), paths_of(branches)
    expected = {
        (local, int(place_W[key]))
        for local, token in enumerate(rank_token_indices(start_G, rank, size).tolist())
        for key in paths[token]
    }
    padded = make_padded_plan(start_G, branches, rank, size, CPU)
    assert padded.query_index_P[padded.slot_index_S].tolist() == list(range(start_G[-1] // size))
    assert attended_in_blocks(padded, size) == expected
    assert attended_in_runs(make_varlen_plan(start_G, branches, rank, size, CPU)) == expected
