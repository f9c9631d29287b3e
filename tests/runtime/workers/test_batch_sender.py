"""What a batch sender sends: only an update of the batch that was scored refers to its rows."""

import pytest

from mega_agentrl.batch.packed_rows import POLICY_TARGETS
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, OptimConfig, ParallelConfig
from mega_agentrl.runtime.workers.batch_sender import BatchSender
from tests.estimate.shapes import config_folder
from tests.parallel.reference import make_batch


@pytest.fixture
def sender():
    config = TrainConfig(
        model=ModelConfig(path=config_folder()),
        parallel=ParallelConfig(data=2),
        optim=OptimConfig(micro_batch_tokens=24, num_minibatches=2),
    )
    return BatchSender(config, put=lambda shard: shard)


def num_new_rows(shards):
    return sum(update.new_rows.num_rows for update, _ in shards)


def test_a_later_version_of_the_batch_refers_to_the_scored_rows_once(sender):
    batch = make_batch()
    scored = sender.send_for_scoring(batch)
    later = batch.with_fields(advantage_BT=-batch.advantage_BT)
    shards = sender.send_for_update(later, POLICY_TARGETS, "token_mean")
    assert [rows for _, rows in shards] == [rows for (rows,) in scored]
    # The five rows that are trained on are in two optimizer steps, which are balanced apart.
    assert num_new_rows(shards) < 5
    again = sender.send_for_update(later, POLICY_TARGETS, "token_mean")
    assert [rows for _, rows in again] == [None, None]
    assert num_new_rows(again) == 5


def test_another_batch_is_sent_whole(sender):
    sender.send_for_scoring(make_batch())
    shards = sender.send_for_update(make_batch(), POLICY_TARGETS, "token_mean")
    assert [rows for _, rows in shards] == [None, None]
    assert num_new_rows(shards) == 5
