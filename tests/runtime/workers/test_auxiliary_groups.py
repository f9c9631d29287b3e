"""`CriticGroup` and `RewardModelGroup` with fake ranks, and with real ones."""

import math
from pathlib import Path

import pytest
import torch

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ModelConfig, OptimConfig, ParallelConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.inputs import check_tokenizers
from mega_agentrl.runtime.remote_calls import ModelRankDiedError, RemoteCallError
from mega_agentrl.runtime.workers.auxiliary_groups import CriticGroup, RewardModelGroup
from mega_agentrl.train.resume.pending_checkpoint import ModelSave, PendingCheckpoint
from mega_agentrl.types.errors import AuxiliaryModelLostError
from tests.config.refusals import refused_setting
from tests.estimate.shapes import config_folder
from tests.fakes import CharCodec
from tests.runtime.fake_ranks import FakeRank, batch
from tests.tiny_models import make_tiny_model
from tests.train_batches import select_rows

TWO_DATA_RANKS = TrainConfig(
    model=ModelConfig(path=config_folder()), parallel=ParallelConfig(data=2)
)


def test_values_are_assembled_and_a_dead_rank_is_named(fake_ranks):
    dying = FakeRank.remote(1, dies_in="update")
    group = CriticGroup([fake_ranks[0], dying], TWO_DATA_RANKS)
    filled = group.compute_values(batch())
    assert filled.value_BT.tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    assert group.load_checkpoint(Path("/run/step-000001"))["from"] == "/run/step-000001"
    assert group.start_save(Path("/run/critic/step-000002")) == "manifest of rank 0"
    with pytest.raises(ModelRankDiedError) as caught:
        group.update(filled)
    assert (caught.value.operation, caught.value.process_name) == ("critic update", "critic rank 1")
    # The other rank may report its lost peer first: the error is the same.
    failed = RemoteCallError("lost its peer", "critic update", ["critic rank 0"])
    found = group.diagnose(failed)
    assert isinstance(found, AuxiliaryModelLostError)
    assert (found.operation, found.process_name) == ("critic update", "critic rank 1")
    restarts = []
    group._relaunch = lambda: restarts.append("relaunch")
    group.start = lambda: restarts.append("start")
    group._actors = []  # the other ranks are shared with other tests
    group.restart_if_lost()
    group.restart_if_lost()
    assert restarts == ["relaunch", "start"]


def test_resetting_an_untrained_critic_does_nothing():
    # The group was not launched: restarting its ranks would fail.
    CriticGroup([], TrainConfig()).reset()


@pytest.mark.extended
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
        folder = tmp_path / "critic" / "step-000001"
        save = PendingCheckpoint(1, [ModelSave(group, folder, {"step": 1}, 3)])
        learned = group.compute_values(given)
        second = group.update(learned)  # while the checkpoint is written
        save.commit()
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


def test_scores_are_assembled_from_all_ranks(fake_ranks):
    group = RewardModelGroup(fake_ranks, TWO_DATA_RANKS)
    assert group.compute_scores(batch()).tolist() == [3.0, 7.0, 11.0]
    with pytest.raises(RemoteCallError) as caught:
        group.compute_scores(select_rows(batch(), [0]))
    assert caught.value.operation == "reward model compute_scores"
    assert caught.value.processes == ("reward model rank 1",)


@pytest.mark.extended
def test_real_reward_model_matches_transformers(ray_local, tmp_path):
    import transformers

    folder = str(make_tiny_model("qwen3_reward", tmp_path / "judge"))
    config = TrainConfig(
        model=ModelConfig(path=folder),
        optim=OptimConfig(micro_batch_tokens=64),
        cluster=ClusterConfig(call_timeout_s=300.0),
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

    check_tokenizers(CharCodec(), CharCodec(), "key", "judge")
    for codec in (Other(), Larger()):
        setting = refused_setting(check_tokenizers, CharCodec(), codec, "key", "judge")
        assert setting == ("key", "judge")
