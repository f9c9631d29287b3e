"""Trees against flat rows: packings by hand and as a property, and the updates of random trees."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mega_agentrl.actor.critic import CriticRank
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.actor.reward_model import RewardModelRank
from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.config.algorithm_traits import LOSSES
from mega_agentrl.config.enums import LossAggregation
from tests.actor.training.whole_objective import objective, with_corrections
from tests.parallel.policy_jobs import gradients_before_step
from tests.rank_shards import pack_rows, score, update
from tests.tiny_models import make_tiny_model
from tests.tree_batches import TreeShape, make_tree_batch, paths_of, tree_shapes

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def test_a_fork_is_packed_behind_its_parent_without_the_shared_tokens():
    # A prompt of 2, a response of 3, and a fork of its first token with 2 more.
    tree = TreeShape(prompt_length=2, rows=((None, 0, 3), (0, 1, 2)))
    batch = make_tree_batch((tree,))
    micro = pack_rows(batch, [0, 1], torch.ones_like(batch.mask_BT), CPU)
    (prompt, _), response = batch.prompt_ids, batch.response_BT.tolist()
    assert micro.token_S.tolist() == [*prompt, *response[0][:2], response[1][1]]
    assert micro.position_S.tolist() == [0, 1, 2, 3, 3]
    assert micro.start_G == (0, 5)
    assert [branch.path for branch in micro.branches] == [(), ((0, 3),)]
    # The first response token of both rows at once; the fork's parent predicts both branches.
    assert micro.predict_N.tolist() == [1, 2, 2, 3, 4]
    first, second, third = response[0]
    assert micro.target_N.tolist() == [first, second, response[1][1], third, response[1][2]]
    value_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    value_RT = micro.to_rows(value_N, 3)
    assert value_RT.tolist() == [[1, 2, 4], [1, 3, 5]]
    (value_RT * torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])).sum().backward()
    # The shared token has the sum of the gradients of its rows.
    assert value_N.grad.tolist() == [11, 2, 20, 3, 30]


@given(drawn=tree_shapes(), data=st.data(), size=st.integers(1, 3), multiple=st.integers(1, 3))
def test_each_token_is_packed_once_with_its_path(drawn, data, size, multiple):
    batch = make_tree_batch(drawn)
    rows = PackedRows.from_batch(batch)
    indices = [row for row in range(rows.num_rows) if data.draw(st.booleans())]
    shards = [
        pack_rows(
            batch,
            indices,
            batch.mask_BT,
            CPU,
            context_rank=rank,
            context_size=size,
            multiple=multiple,
        )
        for rank in range(size)
    ]
    whole = pack_rows(batch, indices, batch.mask_BT, CPU)
    taken = rows.take(indices)
    num_unique = int((taken.input_length_R - taken.shared_input_length_R).sum())
    assert len(whole.token_S) == max(num_unique, 1)
    paths, tokens = paths_of(whole.branches), whole.token_S.tolist()
    packed = {tuple(tokens[token] for token in path) for path in paths}
    for sequence, length in zip(
        rows.sequences(indices), taken.input_length_R.tolist(), strict=True
    ):
        assert tuple(sequence[:length].tolist()) in packed
    assert whole.position_S.tolist() == [len(path) - 1 for path in paths]
    # Each evaluated token has its parent's whole path before it, on one rank.
    width = batch.response_BT.size(1)
    expected_RT = (batch.response_BT + 1) * batch.mask_BT
    got_RT = sum(shard.to_rows(shard.target_N + 1, width) for shard in shards)
    chosen = rows.row_R[indices].tolist()
    assert torch.equal(got_RT, expected_RT[chosen])
    for shard in shards:
        assert len(shard.target_N) == len(shard.predicted_K.unique())
        # Each tensor rank's parents are among its part of the tokens, and follow those before.
        part = len(shard.token_S) // multiple
        holders = [int(parent) // part for parent in shard.predict_N]
        assert holders == sorted(holders)
        assert [holders.count(rank) for rank in range(multiple)] == list(shard.predicted_of_ranks)
        places = zip(shard.predicted_K, shard.row_K, shard.column_K, strict=True)
        for number, row, column in places:
            before = shard.token_S[shard.predict_N[number]]
            sequence = rows.sequences([indices[row]])[0]
            place = int(rows.prompt_length_R[indices[row]]) + int(column)
            assert int(before) == sequence[place - 1]
            assert int(shard.position_S[shard.predict_N[number]]) == place - 1
    assert len({shard.start_G for shard in shards}) == 1
    assert len(shards[0].token_S) % multiple == 0


def updates(rank, batch, **options):
    """Return the stats and the gradients before clipping of an update with trees and without."""
    found = []
    for share in (True, False):
        with gradients_before_step(rank.megatron_model) as caught:
            stats = update(rank, batch, lr=0.0, share=share, **options)
        found.append((stats, caught[0]))
    return found


def check_equal(trees, flat):
    (tree_stats, tree_gradients), (flat_stats, flat_gradients) = trees, flat
    assert tree_stats.loss == pytest.approx(flat_stats.loss, rel=TOLERANCE, abs=1e-7)
    assert tree_stats.num_tokens == flat_stats.num_tokens
    assert tree_stats.metrics == pytest.approx(flat_stats.metrics, rel=TOLERANCE, abs=1e-6)
    whole = float(torch.cat([value.flatten() for *_, value in flat_gradients]).norm())
    assume(whole > 0)  # else every token is clipped
    for (name, _, got), (_, _, expected) in zip(tree_gradients, flat_gradients, strict=True):
        # Tensors whose whole gradient is rounding are held against the whole.
        error = float((got - expected).double().norm())
        bound = TOLERANCE * max(float(expected.double().norm()), 1e-3 * whole)
        assert error <= bound, (name, error / float(expected.norm()))


def check_scores(trees, flat):
    """Compare what `score` returned: row numbers, and values in their order."""
    for got, expected in zip(trees[1:], flat[1:], strict=True):
        in_order = got[np.argsort(trees[0])], expected[np.argsort(flat[0])]
        torch.testing.assert_close(*in_order, rtol=TOLERANCE, atol=TOLERANCE)


def over_trees(rank, check):
    """Call `check(batch, kl_weight_BT, data)` for batches of random trees, with random budgets.

    The batches have all that an update reads.
    """

    @settings(max_examples=8, deadline=None)
    @given(drawn=tree_shapes(), seed=st.integers(0, 1000), extra=st.integers(0, 40), data=st.data())
    def over(drawn, seed, extra, data):
        batch = make_tree_batch(drawn, seed=seed)
        batch.mask_BT[0, 0] = True
        batch = with_corrections(batch, seed)
        rows = PackedRows.from_batch(batch)
        rank._config.optim.micro_batch_tokens = int(rows.input_length_R.max()) + extra
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(3, *batch.response_BT.shape, generator=generator)
        batch = batch.with_fields(value_BT=noise[0], return_BT=noise[1])
        check(batch, noise[2].abs(), data)

    over()


@pytest.fixture
def policy(checkpoints, train_config, lone_rank):
    """Return a policy on one rank."""
    with closing(PolicyRank(train_config(checkpoints[True]), lone_rank)) as policy:
        policy.load_hf(str(checkpoints[True]))
        yield policy


def test_every_loss_has_the_gradients_of_flat_rows(policy):
    def check(batch, kl_weight_BT, data):
        algo = objective(data.draw(st.sampled_from(list(LOSSES.registered()))))
        algo.loss_aggregation = data.draw(st.sampled_from(list(LossAggregation)))
        policy.set_objective(algo, 1.3)
        _, logp_RT, _ = score(policy, "compute_log_probs", batch)
        batch = batch.with_fields(
            old_logp_BT=logp_RT + 0.3 * batch.value_BT, ref_logp_BT=logp_RT - 0.3 * batch.value_BT
        )
        if data.draw(st.booleans()):
            kl_weight_BT = None
        check_equal(*updates(policy, batch, kl_weight_BT=kl_weight_BT))

    over_trees(policy, check)


def test_log_probs_of_shared_tokens_are_those_of_flat_rows(policy):
    def check(batch, _, data):
        flat = batch.with_fields(tree_order_B=None, shared_length_B=None)
        scores = [score(policy, "compute_log_probs", one) for one in (batch, flat)]
        check_scores(*scores)

    over_trees(policy, check)


def test_the_critic_has_the_gradients_of_flat_rows(checkpoints, train_config, lone_rank):
    config = train_config(checkpoints[True])
    critic = CriticRank(config, lone_rank, model_path=str(checkpoints[True]))
    with closing(critic):
        critic.load_hf(str(checkpoints[True]))
        head = critic.megatron_model.parameters["output_layer.weight"]
        head.detach().copy_(torch.linspace(-1, 1, head.numel()).view_as(head))
        over_trees(critic, lambda batch, *_: check_equal(*updates(critic, batch)))


def test_the_scores_of_a_reward_model_are_those_of_flat_rows(tmp_path, train_config, lone_rank):
    folder = str(make_tiny_model("qwen3_reward", tmp_path / "reward"))
    config = train_config(folder)
    config.optim.micro_batch_tokens = 64
    with closing(RewardModelRank(config, lone_rank, model_path=folder)) as model:
        model.load_hf(folder)
        batch = make_tree_batch()
        flat = batch.with_fields(tree_order_B=None, shared_length_B=None)
        scores = [score(model, "compute_scores", one) for one in (batch, flat)]
        check_scores(*scores)
