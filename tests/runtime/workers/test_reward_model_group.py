"""`RewardModelGroup` with fake ranks, and with real ones."""

import pytest
import ray
import torch

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, OptimConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.inputs import check_tokenizers
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.reward_model_group import RewardModelGroup
from tests.fakes import CharCodec
from tests.runtime.workers.test_policy_group import batch
from tests.tiny_models import make_tiny_model


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; a score is the sum of a row's tokens."""

    def __init__(self, rank):
        self.rank = rank

    def find_free_address(self):
        return "here", 1

    def compute_scores(self, given):
        if given.num_rows == 1:
            raise OSError("lost its GPU")
        rows = list(range(self.rank, given.num_rows, 2))
        return (rows, given.response_BT[rows].sum(dim=1).float()) if rows else None


def test_scores_are_assembled_from_all_ranks(ray_local):
    group = RewardModelGroup([Rank.remote(rank) for rank in range(2)], TrainConfig())
    assert group.compute_scores(batch()).tolist() == [3.0, 7.0, 11.0]
    with pytest.raises(
        RemoteCallError, match=r"reward model compute_scores failed on reward model rank \d"
    ):
        group.compute_scores(batch().select_rows([0]))
    group.close()
    group.close()


def test_real_ranks_match_transformers(ray_local, tmp_path):
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
