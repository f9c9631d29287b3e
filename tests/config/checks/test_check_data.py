"""Files that must exist and settings that exclude each other."""

import pytest

from mega_agentrl.config.checks.data import check_data
from mega_agentrl.config.enums import Truncation
from mega_agentrl.config.schema import DataConfig, TrainConfig


@pytest.fixture
def config(tmp_path):
    for name in ("a.parquet", "b.jsonl", "held_out.parquet", "t.jinja"):
        (tmp_path / name).touch()
    train = [str(tmp_path / "a.parquet"), f"{tmp_path}/b.jsonl@0.5"]
    return TrainConfig(data=DataConfig(train=train, validation=str(tmp_path / "held_out.parquet")))


def test_every_local_file_must_exist(config):
    check_data(config)
    config.data.train.append("s3://bucket/c.parquet")
    check_data(config)
    config.data.train.append("nowhere.jsonl@2")
    with pytest.raises(ValueError, match=r"data\.train='nowhere\.jsonl': there is no such file"):
        check_data(config)
    config.data.train[-1] = "file:///nowhere.jsonl"
    with pytest.raises(ValueError, match=r"data\.train='/nowhere\.jsonl': there is no such file"):
        check_data(config)
    config.data.dataset_class = "my.module:Rows"
    check_data(config)


def test_a_prompt_template_must_exist(config, tmp_path):
    config.data.prompt_template = str(tmp_path / "t.jinja")
    check_data(config)
    config.data.prompt_template = "nowhere.jinja"
    with pytest.raises(
        ValueError, match=r"data\.prompt_template='nowhere\.jinja': there is no such file"
    ):
        check_data(config)


@pytest.mark.parametrize("truncation", list(Truncation))
def test_a_cut_prompt_cannot_be_rendered_again(config, truncation):
    config.data.truncation = truncation
    check_data(config)
    config.rollout.use_inference_chat_template = True
    if truncation in (Truncation.error, Truncation.drop):
        check_data(config)
    else:
        with pytest.raises(ValueError, match=rf"data\.truncation={truncation}: expected error or"):
            check_data(config)
