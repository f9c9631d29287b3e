"""The folder that is written: prompts, demonstrations, disjoint splits."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.settings import TaskSettings, is_written
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.data.sft_dataset import encode_demonstrations, read_conversations
from mega_agentrl.data.toolqa.dataset_writer import write_toolqa_dataset

SETTINGS = TaskSettings(num_train=90, num_dev=30, num_validation=30, num_demonstrations=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toolqa")
    write_toolqa_dataset(path, SETTINGS)
    return path


def prompts(folder, split):
    codec = HFCodec(folder / "model")
    return load_prompts(
        [DataFile(str(folder / f"{split}.parquet"))],
        codec,
        DataConfig(max_prompt_tokens=32),
        key=f"data.{split}",
    ).prompts


def test_the_splits_have_their_sizes_and_share_no_question(folder):
    texts = [
        {prompt.messages[0]["content"] for prompt in prompts(folder, split)}
        for split in ("train", "dev", "validation")
    ]
    assert list(map(len, texts)) == [90, 30, 30]
    assert len(set.union(*texts)) == 150


def test_prompts_offer_both_tools_and_carry_their_split(folder):
    for prompt in prompts(folder, "validation"):
        assert prompt.tools_kwargs == {"python": {}, "search": {}}
        assert prompt.extra_info["split"] == "validation"
        assert prompt.data_source in ("toolqa_python", "toolqa_search", "toolqa_both")


def test_demonstrations_are_short_and_end_in_eos(folder):
    codec = HFCodec(folder / "model")
    demonstrations = encode_demonstrations(
        read_conversations(folder / "demonstrations.parquet"), codec, max_tokens=96
    )
    assert len(demonstrations) == 200
    assert all(item.response_ids[-1] == codec.eos_id for item in demonstrations)
    assert any(0 in item.loss_mask for item in demonstrations)


def test_the_stamp_is_set_and_rewriting_gives_the_same_bytes(folder, tmp_path):
    assert is_written(folder, SETTINGS)
    write_toolqa_dataset(tmp_path, SETTINGS)
    for name in SETTINGS.task.output_files:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name
