"""Demonstrations are the spans a rollout would build; only the assistant's are trained on."""

import json

import pytest
import torch

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.data.sft_dataset import (
    Demonstration,
    DemonstrationSampler,
    collate_demonstrations,
    encode_demonstration,
    encode_demonstrations,
    read_conversations,
)
from mega_agentrl.errors import InputError
from tests.fakes import CharCodec


class LetterCodec(CharCodec):
    """The template writes 900 + letters + 901, a next turn 902."""

    def apply_chat_template(self, messages, tools=None):
        return [900, *self.encode("".join(m["content"] for m in messages)), 901]

    def encode_next_turn(self, messages):
        return [902, *self.encode("".join(m["content"] for m in messages))]


def chat(*turns):
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def test_tool_answers_are_masked_and_eos_comes_only_at_the_end():
    item = encode_demonstration(chat("uQ", "aAB", "tT", "aC"), LetterCodec(), "here")
    assert item.prompt_ids == (900, ord("Q"), 901)
    assert item.response_ids == (*map(ord, "ABTC"), 0)
    assert item.loss_mask == (1, 1, 0, 1, 1)


def test_a_later_user_turn_ends_the_assistants_and_is_masked():
    item = encode_demonstration(chat("sS", "uQ", "aA", "uR", "aB"), LetterCodec(), "here")
    assert item.prompt_ids == (900, ord("S"), ord("Q"), 901)
    assert item.response_ids == (ord("A"), 0, 902, ord("R"), ord("B"), 0)
    assert item.loss_mask == (1, 1, 0, 0, 1, 1)


def with_calls(tmp_path):
    """A demonstration in OpenAI's form: the calls beside a null content."""
    path = tmp_path / "calls.jsonl"
    calls = [
        {"id": "c1", "function": {"name": "f", "arguments": '{"ids": [1, "é"]}'}},
        {"id": "c2", "function": {"name": "g", "arguments": {}}},
    ]
    assistant = {"role": "assistant", "content": None, "tool_calls": calls}
    tools = [{"role": "tool", "content": "T"}, {"role": "tool", "content": None}]
    rows = [{"messages": [*chat("uQ"), assistant, *tools, *chat("aA")]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_conversations(path)


def test_calls_beside_a_null_content_are_trained_on_as_the_policy_writes_them(tmp_path):
    (item,) = encode_demonstrations(with_calls(tmp_path), LetterCodec(), tool_messages=True)
    text = (
        '<tool_call>\n{"name": "f", "arguments": {"ids": [1, "é"]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert item.response_ids == (*map(ord, text), 0, 902, ord("T"), ord("A"), 0)
    assert item.loss_mask == (*[1] * (len(text) + 1), 0, 0, 1, 1)


def test_calls_that_the_tag_protocol_cannot_write_are_refused(tmp_path):
    with pytest.raises(InputError) as caught:
        encode_demonstrations(with_calls(tmp_path), LetterCodec())
    assert caught.value.name == f"sft.train_data={tmp_path}/calls.jsonl line 1, tool_calls"
    assert caught.value.got == ["f", "g"]


@pytest.mark.parametrize("turns", [("uQ",), ("aA",), ("uQ", "aA", "tT"), ("uQ", "aA", "uR")])
def test_a_conversation_must_start_with_a_question_and_end_with_an_answer(turns):
    with pytest.raises(InputError) as caught:
        encode_demonstration(chat(*turns), LetterCodec(), "here")
    assert caught.value.name == "here"


def test_every_row_is_read_and_its_length_checked(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    rows = [{"messages": chat("uQ", "aA")}, {"messages": chat("uQ", "aABC")}]
    path.write_text("\n".join(map(json.dumps, rows)))
    conversations = read_conversations(path)
    found = encode_demonstrations(conversations, LetterCodec(), max_tokens=7)
    assert [len(item.response_ids) for item in found] == [2, 4]
    with pytest.raises(InputError) as caught:
        encode_demonstrations(conversations, LetterCodec(), max_tokens=6)
    assert caught.value.name == f"sft.train_data={path} line 2"
    assert caught.value.got == "7 tokens"
    path.write_text('{"prompt": "x"}')
    with pytest.raises(InputError) as caught:
        read_conversations(path)
    assert (caught.value.name, caught.value.got) == (f"sft.train_data={path} line 1", ["prompt"])


def test_a_model_of_text_refuses_images(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    row = {"messages": chat("u<image>Q", "aA"), "images": ["a.png"], "pictures": ["a.png"]}
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError) as caught:
        read_conversations(path)
    assert caught.value.key == f"sft.train_data={path} line 1, column images"
    with pytest.raises(ConfigError) as caught:
        read_conversations(path, config=DataConfig(image_key="pictures"))
    assert caught.value.key == f"sft.train_data={path} line 1, column pictures"
    assert len(read_conversations(path, config=DataConfig(image_key=""))) == 1


class ToolCountCodec(LetterCodec):
    """The template writes the number of tools in place of the messages."""

    def apply_chat_template(self, messages, tools=None):
        return [len(tools or ())]


def test_the_template_renders_the_tools_of_the_row(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    tools = json.dumps([{"name": "book"}, {"name": "cancel"}])
    rows = [{"messages": chat("uQ", "aA"), "tools": tools}, {"messages": chat("uQ", "aA")}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = encode_demonstrations(read_conversations(path), ToolCountCodec())
    assert [item.prompt_ids for item in found] == [(2,), (0,)]


SHORT = Demonstration((1, 2), (5, 6, 0), (1, 0, 1))
LONG = Demonstration((1,), (7, 8, 9, 9, 0), (1, 1, 0, 0, 1))


def test_a_batch_is_padded_and_masked():
    batch = collate_demonstrations([SHORT, LONG])
    assert batch.prompt_ids == ((1, 2), (1,))
    assert batch.response_BT.tolist() == [[5, 6, 0, 0, 0], [7, 8, 9, 9, 0]]
    assert batch.length_B.tolist() == [3, 5]
    assert batch.mask_BT.int().tolist() == [[1, 0, 1, 0, 0], [1, 1, 0, 0, 1]]
    assert batch.advantage_BT is batch.old_logp_BT is None
    assert torch.unique(batch.tree_token_BT).numel() == batch.tree_token_BT.numel()


def test_batches_are_seeded_and_resumable():
    items = [Demonstration((index,), (index, 0), (1, 1)) for index in range(7)]
    sampler = DemonstrationSampler(items, seed=1)
    firsts = [row for _ in range(7) for (row,) in sampler.next_batch(2).prompt_ids]
    assert sorted(firsts[:7]) == sorted(firsts[7:]) == list(range(7))
    resumed = DemonstrationSampler(items, seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.next_batch(5).prompt_ids == sampler.next_batch(5).prompt_ids
