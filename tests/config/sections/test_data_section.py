"""Ranges of `data.*`."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.enums import PromptOrder, Truncation
from mega_agentrl.config.sections.data import DataConfig


def test_a_list_of_files_survives_the_schema():
    node = OmegaConf.structured(DataConfig)
    node.train = ["a.parquet", "b.jsonl@0.5"]
    config = OmegaConf.to_object(node)
    assert config.train == ["a.parquet", "b.jsonl@0.5"]
    assert (config.truncation, config.order) == (Truncation.error, PromptOrder.shuffled)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompts_per_step": 0}, r"data\.prompts_per_step=0: expected at least 1"),
        ({"max_prompt_tokens": 0}, r"data\.max_prompt_tokens=0: expected at least 1"),
        ({"prompt_key": " "}, r"data\.prompt_key=' ': expected the name of a column"),
        ({"reward_fn_key": ""}, r"data\.reward_fn_key='': expected the name of a column"),
        ({"dataset_class": "a.b.C"}, r"data\.dataset_class=a\.b\.C: expected package"),
        ({"train": 3}, r"data\.train=3: expected a path"),
        ({"train": "a@2", "dataset_class": "a:C"}, r"data\.train=a@2: expected no weights"),
        ({"validation": "a@2"}, r"data\.validation=a@2: expected no weights"),
    ],
)
def test_out_of_range_names_key_and_value(values, expected):
    with pytest.raises(ValueError, match=expected):
        DataConfig(**values)
