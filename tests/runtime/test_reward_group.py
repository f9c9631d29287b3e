"""The group of a reward model: its ranks' rows put together, and the real ranks beside it."""

import pytest
import ray
import torch

from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig
from mega_agentrl.config.schema import ClusterConfig, ModelConfig, OptimConfig, TrainConfig
from mega_agentrl.runtime.inputs import check_tokenizers
from mega_agentrl.runtime.remote import RemoteError
from mega_agentrl.runtime.reward_group import RewardGroup
from tests.fakes import CharCodec
from tests.runtime.test_policy_group import batch
from tests.tiny_models import make_tiny_model


@ray.remote(num_cpus=0)
class Rank:
    """Data-parallel rank of two; a score is the sum of a row's tokens."""

    def __init__(self, rank):
        self.rank = rank

    def address(self):
        return "here", 1

    def scores(self, given):
        if given.num_rows == 1:
            raise OSError("lost its GPU")
        rows = list(range(self.rank, given.num_rows, 2))
        return (rows, given.response_BT[rows].sum(dim=1).float()) if rows else None


def test_rows_of_all_ranks_come_together(ray_local):
    group = RewardGroup([Rank.remote(rank) for rank in range(2)], TrainConfig())
    assert group.scores(batch()).tolist() == [3.0, 7.0, 11.0]
    with pytest.raises(RemoteError, match=r"reward model scores failed on reward model rank \d"):
        group.scores(batch().select([0]))
    group.close()
    group.close()


def test_real_ranks_score_as_transformers_do(ray_local, tmp_path):
    import transformers

    folder = str(make_tiny_model("qwen3_reward", tmp_path / "judge"))
    config = TrainConfig(
        model=ModelConfig(path=folder),
        optim=OptimConfig(micro_batch_tokens=64),
        cluster=ClusterConfig(call_deadline_s=120.0),
        reward=RewardConfig(
            rubric={"default": {"model": 1.0}}, model=RewardModelConfig(source=folder)
        ),
    )
    group = RewardGroup.launch(config, on_gpu=False, log_folder=tmp_path / "logs")
    try:
        group.start()
        got_B = group.scores(batch())
    finally:
        group.close()
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = zip(batch().prompt_ids, batch().response_BT.tolist(), strict=True)
    with torch.no_grad():
        expected = [model(torch.tensor([[*prompt, *said]])).logits.item() for prompt, said in rows]
    assert got_B.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_judge_reads_the_ids_that_the_policy_writes():
    class Other(CharCodec):
        def encode(self, text):
            return [ord(char) + 1 for char in text]

    class Larger(CharCodec):
        vocab_size = 131

    check_tokenizers(CharCodec(), CharCodec(), "judge")
    for codec in (Other(), Larger()):
        with pytest.raises(ValueError, match="key=judge: its tokenizer has 13"):
            check_tokenizers(CharCodec(), codec, "key=judge")
