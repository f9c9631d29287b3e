"""Which data rank gets which rows: every row once, and its tokens once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.batch.micro_batching import minibatch_masks
from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.batch.row_sharding import RowSharder, load_imbalance
from mega_agentrl.batch.tree_order import row_lengths
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import OptimConfig, ParallelConfig
from tests.parallel.reference import make_batch
from tests.tree_batches import make_tree_batch, tree_shapes


def shards_of(batch, sharder, num_steps):
    """Return the shards for scoring and for an update in this number of steps."""
    rows = PackedRows.from_batch(batch)
    scored = sharder.scoring_shards(rows)
    return scored, sharder.update_shards(
        batch,
        minibatch_masks(batch, num_steps),
        rows=rows,
        aggregation="token_mean",
        targets=("old_logp",),
        scored=scored,
    )


def test_only_rows_that_another_rank_has_scored_are_sent_again():
    # The model reads 11, 12, 8, 7, 10 and 9 tokens; row 3 is not trained on.
    sharder = RowSharder(num_data=2, budget_tokens=24, num_multiple=1)
    scored, updates = shards_of(make_batch(), sharder, 2)
    # 12 + 9 + 8 against 11 + 10 + 7.
    assert [shard.rows.row_R.tolist() for shard in scored] == [[1, 2, 5], [0, 3, 4]]
    # 12 against 11 + 8 in the first step, 10 against 9 in the second.
    assert [shard.row_R.tolist() for shard in updates] == [[1, 4], [0, 2, 5]]
    assert [shard.new_rows.row_R.tolist() for shard in updates] == [[4], [2, 5]]
    plans = [[step.micros for step in shard.steps] for shard in updates]
    assert plans == [[((0,),), ((1,),)], [((0, 1),), ((2,),)]]


def test_ranks_are_sent_the_tokens_of_their_trees_once():
    # Trees of 23, 13 and 9 tokens: 22 against 12 and 8.
    sharder = RowSharder(num_data=2, budget_tokens=24, num_multiple=1)
    scored, updates = shards_of(make_tree_batch(), sharder, 1)
    assert [shard.rows.row_R.tolist() for shard in scored] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(shard.rows.token_N) for shard in scored] == [23, 22]
    assert [shard.new_rows.num_rows for shard in updates] == [0, 0]
    # 11 + 5 + 1 + 2 tokens of the first tree's inputs.
    assert [step.cost for shard in updates for step in shard.steps] == [19, 12 + 4 + 4]
    assert load_imbalance(updates) == pytest.approx(20 / 19.5)


def test_imbalance_of_steps_is_that_of_the_costliest_ranks():
    def shards(*costs):
        return [SimpleNamespace(steps=[SimpleNamespace(cost=c) for c in rank]) for rank in costs]

    # Different ranks are costliest in the two steps, and the others wait in both.
    assert load_imbalance(shards([3.0, 1.0], [1.0, 3.0])) == 1.5
    assert load_imbalance(shards([4.0], [0.0], [0.0], [0.0])) == 4.0
    assert load_imbalance(shards([], [])) == 1.0


@given(
    drawn=tree_shapes(),
    num_data=st.integers(1, 7),
    extra_tokens=st.integers(0, 60),
    num_multiple=st.integers(1, 3),
    num_steps=st.integers(1, 7),
)
def test_every_row_is_scored_and_trained_on_once(
    drawn, num_data, extra_tokens, num_multiple, num_steps
):
    batch = make_tree_batch(drawn)
    budget_tokens = int(PackedRows.from_batch(batch).input_length_R.max()) + extra_tokens
    sharder = RowSharder(num_data=num_data, budget_tokens=budget_tokens, num_multiple=num_multiple)
    rows = PackedRows.from_batch(batch)
    scored, updates = shards_of(batch, sharder, num_steps)
    numbers = [
        int(shard.rows.row_R[index])
        for shard in scored
        for micro in shard.micros
        for index in micro
    ]
    assert sorted(numbers) == list(range(batch.num_rows))
    masks = [mask_BT for mask_BT in minibatch_masks(batch, num_steps) if mask_BT.any()]
    for shard, before in zip(updates, scored, strict=True):
        assert not set(shard.new_rows.row_R) & set(before.rows.row_R)
        order = rows.row_R.tolist()
        own = shard.gather_rows(before)
        expected = rows.take([order.index(row) for row in shard.row_R])
        assert own.token_N.tolist() == expected.token_N.tolist()
        assert own.shared_length_R.tolist() == expected.shared_length_R.tolist()
        assert [step.denominator for step in shard.steps] == [int(mask.sum()) for mask in masks]
        assert {len(step.micros) % num_multiple for step in shard.steps} == {0}
    for number, mask_BT in enumerate(masks):
        trained = [
            int(shard.row_R[index])
            for shard in updates
            for micro in shard.steps[number].micros
            for index in micro
        ]
        assert sorted(trained) == mask_BT.any(dim=1).nonzero().flatten().tolist()


def test_the_sharder_of_a_run_has_its_layout():
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2, context=3, data=4, pipeline=5, virtual_pipeline=2),
        optim=OptimConfig(micro_batch_tokens=100),
    )
    assert RowSharder.from_config(config) == RowSharder(
        num_data=4,
        budget_tokens=300,
        num_multiple=5,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    config.parallel.virtual_pipeline = 1
    assert RowSharder.from_config(config).num_multiple == 1
    # Tensor ranks first, then context, data and pipeline.
    assert [config.parallel.data_rank(rank) for rank in (0, 5, 6, 23, 24, 30)] == [0, 0, 1, 3, 0, 1]


def leave_out(batch, sharder, has_signal, num_steps=1):
    rows = PackedRows.from_batch(batch)
    shards = sharder.update_shards(
        batch,
        minibatch_masks(batch, num_steps),
        rows=rows,
        aggregation="token_mean",
        has_signal_B=torch.tensor(has_signal),
    )
    return shards, sharder.num_spared_tokens(batch, rows, shards)


def test_rows_without_signal_are_left_out_and_count_in_the_denominator():
    # The model reads 11, 12, 8, 7, 10 and 9 tokens; row 3 is not trained on.
    batch = make_batch()
    sharder = RowSharder(num_data=2, budget_tokens=24, num_multiple=1)
    shards, num_spared = leave_out(batch, sharder, [True, False, True, True, False, True])
    assert [shard.row_R.tolist() for shard in shards] == [[0], [2, 5]]
    assert num_spared == 12 + 10
    assert {step.denominator for shard in shards for step in shard.steps} == {
        float(batch.mask_BT.sum())
    }


def test_a_step_without_signal_is_taken_with_empty_micro_batches():
    sharder = RowSharder(num_data=2, budget_tokens=24, num_multiple=2)
    shards, num_spared = leave_out(make_batch(), sharder, [False] * 6, num_steps=2)
    assert [[step.micros for step in shard.steps] for shard in shards] == [[((), ()), ((), ())]] * 2
    assert num_spared == 11 + 12 + 8 + 10 + 9
    assert load_imbalance(shards) == 1


def test_tokens_that_are_shared_with_a_row_that_counts_are_not_spared():
    # The first tree has inputs of 11, and 5, 1 and 2 more tokens; the third row alone reads 12.
    batch = make_tree_batch()
    batch = batch.with_fields(
        mask_BT=torch.ones_like(batch.mask_BT) & (batch.length_B > 0)[:, None]
    )
    sharder = RowSharder(num_data=1, budget_tokens=60, num_multiple=1)
    _, num_spared = leave_out(batch, sharder, [False, False, True, False] + [True] * 4)
    tree = row_lengths(batch)
    alone = int(tree.length_R[tree.row_R == 2][0]) - 1
    assert num_spared == 19 - alone


@pytest.mark.parametrize("num_multiple", [1, 2])
def test_in_order_all_data_ranks_leave_out_the_same_micro_batches(num_multiple):
    batch = make_batch()
    sharder = RowSharder(num_data=2, budget_tokens=12, num_multiple=num_multiple, keeps_order=True)
    whole, _ = leave_out(batch, sharder, [True] * 6)
    rows_of = [
        [[shard.row_R[i] for i in micro] for micro in shard.steps[0].micros] for shard in whole
    ]
    # Only rows of the first micro-batch of the first rank count.
    has_signal = [row in rows_of[0][0] for row in range(6)]
    shards, _ = leave_out(batch, sharder, has_signal)
    got = [[[shard.row_R[i] for i in micro] for micro in shard.steps[0].micros] for shard in shards]
    assert got == [[micros[0], *[[]] * (num_multiple - 1)] for micros in rows_of]
