"""Files that must be there, and settings that do not go together."""

import pytest

from mega_agentrl.config.check_data import check_data
from mega_agentrl.config.choices import Truncation
from mega_agentrl.config.schema import DataConfig, TrainConfig


@pytest.fixture
def config(tmp_path):
    for name in ("a.parquet", "b.jsonl", "held_out.parquet", "t.jinja"):
        (tmp_path / name).touch()
    train = [str(tmp_path / "a.parquet"), f"{tmp_path}/b.jsonl@0.5"]
    return TrainConfig(data=DataConfig(train=train, validation=str(tmp_path / "held_out.parquet")))


def test_every_local_file_of_a_list_is_looked_for(config):
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


def test_a_template_must_be_there(config, tmp_path):
    config.data.template = str(tmp_path / "t.jinja")
    check_data(config)
    config.data.template = "nowhere.jinja"
    with pytest.raises(ValueError, match=r"data\.template='nowhere\.jinja': there is no such file"):
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
