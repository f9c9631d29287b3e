"""The folder of the function-calling task: rows, demonstrations, and tokens that names share."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.calls.demonstrations import GUESS_THOUGHT
from mega_agentrl.data.calls.functions import INTEGER_VALUES, TEXT_VALUES
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.entity_splits import entity_names
from mega_agentrl.data.generated.settings import GeneratedTask
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.reward.function_call import score


@pytest.fixture(scope="module")
def folder(task_folder):
    return task_folder(GeneratedTask.calls)


@pytest.fixture(scope="module")
def codec(folder):
    return HFCodec(folder / "model")


@pytest.fixture(scope="module")
def limits():
    path = find_config_dir() / "experiment" / "smoke_calls.yaml"
    return OmegaConf.load(path)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_prompts_show_their_catalogue_and_fit_the_experiment(folder, codec, limits, split):
    file = DataFile(str(folder / f"{split}.parquet"))
    config = DataConfig(max_prompt_tokens=limits.data.max_prompt_tokens)
    run_tools = {"python": {"type": "function", "function": {"name": "python"}}}
    found = load_prompts([file], codec, config, key="data.train", tool_schemas=run_tools).prompts
    for prompt in found:
        functions = [schema["function"] for schema in prompt.tool_schemas]
        assert len(functions) == 3
        head, *shown = codec.decode(prompt.token_ids).partition("user\n")[0].split("\n")[1:5]
        assert head == "Tools:"
        for function, line in zip(functions, shown, strict=True):
            ((name, schema),) = function["parameters"]["properties"].items()
            assert line == f"{function['name']} {name}: {schema['type']}"


def test_demonstrations_that_read_earn_the_reward_of_their_row_and_no_other(folder):
    truths = {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"]
        for row in pq.read_table(folder / "train.parquet").to_pylist()
    }
    readers = [
        tuple(message["content"] for message in row["messages"])
        for row in pq.read_table(folder / "demonstrations.parquet").to_pylist()
        if GUESS_THOUGHT not in row["messages"][1]["content"]
    ]
    assert len(readers) > 60
    for request, answer in readers:
        assert score(answer, truths[request]).value == 1.0
        wrong = {truth for truth in truths.values() if truth != truths[request]}
        assert score(answer, sorted(wrong)).value == 0.0


def test_names_have_the_same_two_tokens_in_catalogue_request_and_answer(codec):
    for name in entity_names():
        head, tail = codec.encode(name)
        for before, after in [
            ("Tools:\n", " label: string"),
            ("Call:\n", " with 3"),
            ("\n", " none"),
        ]:
            ids = codec.encode(f"{before}{name}{after}")
            assert ids[ids.index(head) + 1] == tail and ids[-1] != tail
        assert codec.encode(f'{{"name": "{name}"')[1:3] == [head, tail]


def test_values_have_the_same_token_in_request_and_call(codec):
    for value in map(str, (*TEXT_VALUES, *INTEGER_VALUES)):
        (token_id,) = codec.encode(value)
        assert token_id in codec.encode(f"Bako with {value}")
        assert token_id in codec.encode(f'{{"count": {value}}}}}')
