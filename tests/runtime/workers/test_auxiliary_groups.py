"""`CriticGroup` and `RewardModelGroup` with fake ranks, and with real ones."""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from mega_agentrl.batch.packed_rows import PackedScores
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ModelConfig, OptimConfig, ParallelConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.inputs import check_tokenizers
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.auxiliary_groups import CriticGroup, RewardModelGroup
from mega_agentrl.types.errors import AuxiliaryModelLostError
from tests.estimate.shapes import config_folder
from tests.fakes import CharCodec
from tests.runtime.workers.test_policy_group import batch, response_tokens
from tests.tiny_models import make_tiny_model
from tests.train_batches import select_rows

TWO_DATA_RANKS = TrainConfig(
    model=ModelConfig(path=config_folder()), parallel=ParallelConfig(data=2)
)


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; a value is half of its token, a score the sum of its tokens."""

    def __init__(self, rank):
        self.rank = rank

    def find_free_address(self):
        return "here", 1

    def call(self, method, *args):
        if method == "update" and args[1] is None:
            if self.rank == 1:
                os._exit(1)
            time.sleep(1)
        if method == "compute_values":
            rows = args[0].rows
            return PackedScores(row_R=rows.row_R, values=(response_tokens(rows) / 2,))
        if method == "compute_scores" and args[0].rows.num_rows:
            rows = args[0].rows
            # The appended token is a 0.
            sums_R = np.add.reduceat(response_tokens(rows), rows.response_start_R1[:-1])
            return PackedScores(row_R=rows.row_R, values=(sums_R,))
        if method == "load_checkpoint":
            return {"from": args[0]}
        if method == "save_checkpoint":
            return args
        raise OSError("lost its GPU")


def test_values_are_assembled_and_a_dead_rank_is_named(ray_local):
    group = CriticGroup([Rank.remote(rank) for rank in range(2)], TWO_DATA_RANKS)
    filled = group.compute_values(batch())
    assert filled.value_BT.tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    assert group.load_checkpoint(Path("/run/step-000001")) == {"from": "/run/step-000001"}
    group.save_checkpoint(Path("/run/critic/step-000002"), {}, 3)
    with pytest.raises(RemoteCallError, match=r"update .*critic rank \d"):
        group.update(filled)
    # Whichever shows first, its death or the other rank's failure, the error is the same.
    with pytest.raises(AuxiliaryModelLostError, match="critic rank 1 died"):
        group.update(filled)
    failed = RemoteCallError("critic update failed on critic rank 0: OSError('lost its peer')")
    found = group.diagnose(failed)
    assert isinstance(found, AuxiliaryModelLostError)
    assert str(found).startswith("critic rank 1 died; critic update failed on critic rank 0")
    group.close()
    group.close()


def test_resetting_an_untrained_critic_does_nothing():
    # The group was not launched: restarting its ranks would fail.
    CriticGroup([], TrainConfig()).reset()


def test_real_critic_trains_saves_and_resumes(ray_local, tmp_path):
    config = TrainConfig(
        model=ModelConfig(path=str(make_tiny_model("qwen3", tmp_path / "policy"))),
        algo=AlgoConfig(advantage="gae"),
        optim=OptimConfig(micro_batch_tokens=64, critic_lr=3e-3),
        cluster=ClusterConfig(call_timeout_s=300.0),
    )
    group = CriticGroup.launch(config, on_gpu=False, log_folder=tmp_path / "logs")
    try:
        group.start()
        given = group.compute_values(batch()).with_fields(return_BT=torch.ones(3, 2))
        assert not given.value_BT.any(), "a new head knows nothing"
        first = group.update(given)
        assert first.learning_rate == 3e-3
        group.save_checkpoint(tmp_path / "critic" / "step-000001", {"step": 1}, 3)
        learned = group.compute_values(given)
        second = group.update(learned)
        assert second.metrics["value_loss"] < first.metrics["value_loss"]
        assert math.isnan(first.metrics["explained_variance"]), "the returns do not vary"
        assert group.load_checkpoint(tmp_path / "critic" / "step-000001") == {"step": 1}
        assert torch.equal(group.compute_values(given).value_BT, learned.value_BT)
        assert group.update(learned).loss == pytest.approx(second.loss, abs=1e-7)
        group.reset()
        assert not group.compute_values(given).value_BT.any(), "it has forgotten"
        assert group.update(given).loss == pytest.approx(first.loss, abs=1e-7)
    finally:
        group.close()


def test_scores_are_assembled_from_all_ranks(ray_local):
    group = RewardModelGroup([Rank.remote(rank) for rank in range(2)], TWO_DATA_RANKS)
    assert group.compute_scores(batch()).tolist() == [3.0, 7.0, 11.0]
    with pytest.raises(RemoteCallError, match=r"compute_scores .*reward model rank \d"):
        group.compute_scores(select_rows(batch(), [0]))
    group.close()
    group.close()


def test_real_reward_model_matches_transformers(ray_local, tmp_path):
    import transformers

    folder = str(make_tiny_model("qwen3_reward", tmp_path / "judge"))
    config = TrainConfig(
        model=ModelConfig(path=folder),
        optim=OptimConfig(micro_batch_tokens=64),
        cluster=ClusterConfig(call_timeout_s=120.0),
        reward=RewardConfig(
            rubric={"default": {"model": 1.0}}, model=RewardModelConfig(path_or_url=folder)
        ),
    )
    group = RewardModelGroup.launch(config, on_gpu=False, log_folder=tmp_path / "logs")
    try:
        group.start()
        got_B = group.compute_scores(batch())
    finally:
        group.close()
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = zip(batch().prompt_ids, batch().response_BT.tolist(), strict=True)
    with torch.no_grad():
        expected = [
            model(torch.tensor([[*prompt, *response]])).logits.item() for prompt, response in rows
        ]
    assert got_B.tolist() == pytest.approx(expected, abs=1e-4)


def test_reward_model_must_share_the_policy_tokenizer():
    class Other(CharCodec):
        def encode(self, text):
            return [ord(char) + 1 for char in text]

    class Larger(CharCodec):
        vocab_size = 131

    check_tokenizers(CharCodec(), CharCodec(), "judge")
    for codec in (Other(), Larger()):
        with pytest.raises(ValueError, match="key=judge: its tokenizer has 13"):
            check_tokenizers(CharCodec(), codec, "key=judge")
