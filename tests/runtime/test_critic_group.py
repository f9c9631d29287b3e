"""The group of a critic: its ranks' rows put together, and the real ranks beside it."""

import os
import time
from pathlib import Path

import pytest
import ray
import torch

from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.choices import Advantage
from mega_agentrl.config.schema import ClusterConfig, ModelConfig, OptimConfig, TrainConfig
from mega_agentrl.runtime.critic_group import CriticGroup
from mega_agentrl.runtime.remote import RemoteError
from mega_agentrl.types.faults import ModelLostError
from tests.runtime.test_policy_group import batch
from tests.tiny_models import make_tiny_model


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; a value is half of its token."""

    def __init__(self, rank):
        self.rank = rank

    def address(self):
        return "here", 1

    def call(self, method, *args):
        if method == "update" and args[0].num_rows == 1:
            if self.rank == 1:
                os._exit(1)
            time.sleep(1)
        if method == "values":
            rows = list(range(self.rank, args[0].num_rows, 2))
            return rows, args[0].response_BT[rows] / 2
        if method == "resume":
            return {"from": args[0]}
        if method == "save":
            return args
        raise OSError("lost its GPU")


def test_rows_of_all_ranks_come_together_and_a_dead_rank_is_named_whatever_others_say(ray_local):
    group = CriticGroup([Rank.remote(rank) for rank in range(2)], TrainConfig())
    filled = group.add_values(batch())
    assert filled.value_BT.tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    assert group.resume(Path("/run/critic/step-000001")) == {"from": "/run/critic/step-000001"}
    group.save(Path("/run/critic/step-000002"), {}, 3)
    with pytest.raises(RemoteError, match=r"critic update failed on critic rank \d"):
        group.update(filled)
    one = batch().select([0])
    # Its death shows first or the other's failure; both are told as the same loss.
    with pytest.raises(ModelLostError, match="critic rank 1 died"):
        group.update(one)
    failed = RemoteError("critic update failed on critic rank 0: OSError('lost its peer')")
    found = group.explain(failed)
    assert isinstance(found, ModelLostError)
    assert str(found).startswith("critic rank 1 died; critic update failed on critic rank 0")
    group.close()
    group.close()


def test_a_critic_that_learned_nothing_is_as_at_its_start_already():
    # Not launched: a new start of its ranks would be an error.
    CriticGroup([], TrainConfig()).reset()


def test_real_ranks_learn_save_and_go_on(ray_local, tmp_path):
    config = TrainConfig(
        model=ModelConfig(path=str(make_tiny_model("qwen3", tmp_path / "policy"))),
        algo=AlgoConfig(advantage=Advantage.gae),
        optim=OptimConfig(micro_batch_tokens=64, critic_lr=3e-3),
        cluster=ClusterConfig(call_deadline_s=300.0),
    )
    group = CriticGroup.launch(config, on_gpu=False, log_folder=tmp_path / "logs")
    try:
        group.start()
        given = group.add_values(batch()).with_fields(return_BT=torch.ones(3, 2))
        assert not given.value_BT.any(), "a new head knows nothing"
        first = group.update(given)
        assert first.learning_rate == 3e-3
        group.save(tmp_path / "critic" / "step-000001", {"step": 1}, 3)
        learned = group.add_values(given)
        second = group.update(learned)
        assert second.metrics["value_loss"] < first.metrics["value_loss"]
        assert group.resume(tmp_path / "critic" / "step-000001") == {"step": 1}
        assert torch.equal(group.add_values(given).value_BT, learned.value_BT)
        assert group.update(learned).loss == pytest.approx(second.loss, abs=1e-7)
        group.reset()
        assert not group.add_values(given).value_BT.any(), "it has forgotten"
        assert group.update(given).loss == pytest.approx(first.loss, abs=1e-7)
    finally:
        group.close()
