"""The folder of the vision task: rows and demonstrations as training reads them."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.settings import GeneratedTask, TaskSettings
from mega_agentrl.data.prompt_images import PromptImageReader
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.data.sft_dataset import (
    DemonstrationSampler,
    encode_demonstrations,
    read_conversations,
)
from mega_agentrl.data.vision_qa.demonstrations import GUESS_THOUGHT
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.images import RolloutImages
from mega_agentrl.vision.processor import ImageProcessor


@pytest.fixture(scope="module")
def folder(task_folder):
    return task_folder(GeneratedTask.vision)


@pytest.fixture(scope="module")
def codec(folder):
    return HFCodec(folder / "model")


@pytest.fixture(scope="module")
def processor(folder):
    return ImageProcessor(folder / "model")


@pytest.fixture
def reader(processor, tmp_path):
    return PromptImageReader(DataConfig(), processor, cache_folder=tmp_path)


def test_a_prompt_has_the_tool_one_picture_and_a_question(folder, codec, reader):
    zoom = {"type": "function", "function": {"name": "zoom"}}
    file = DataFile(str(folder / "validation.parquet"))
    found = load_prompts(
        [file], codec, DataConfig(), key="data.train", tool_schemas={"zoom": zoom}, images=reader
    )
    for prompt in found.prompts:
        text = codec.decode_with_special_tokens(prompt.token_ids)
        (placed,) = prompt.images
        assert text.startswith("<|im_start|>system\nTools:\nzoom<|im_end|>\n<|im_start|>user\n")
        assert f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>Wh" in text
        assert (placed.image.width, placed.image.num_tokens) == (112, 4)


def test_a_demonstration_has_the_tokens_of_the_whole_conversation(folder, codec, reader):
    conversations = read_conversations(folder / "demonstrations.parquet", images=reader)
    made = encode_demonstrations(conversations, codec, tool_messages=True)
    newline = codec.encode("\n")
    placeholder = codec.image_tokens.image_id
    for item, conversation in zip(made, conversations, strict=True):
        whole = codec.apply_chat_template(
            conversation.messages, list(conversation.tool_schemas), add_generation_prompt=False
        )
        ids = (*item.prompt_ids, *item.response_ids)
        assert [*ids, *newline] == whole
        shown = [index for placed in item.images for index in range(placed.start, placed.stop)]
        assert shown == [index for index, token in enumerate(ids) if token == placeholder]
        trained = [t for t, mask in zip(item.response_ids, item.loss_mask, strict=True) if mask]
        assert not {placeholder, codec.image_tokens.start_id} & set(trained)
        text = codec.decode(trained)
        assert ("zoom" in text) == (len(item.images) == 2)
        assert "Region" not in text and "user" not in text


def test_a_batch_has_the_pixels_of_its_images(folder, codec, reader, processor):
    conversations = read_conversations(folder / "demonstrations.parquet", images=reader)
    made = encode_demonstrations(conversations, codec, tool_messages=True)
    images = RolloutImages(processor, codec.image_tokens)
    batch = DemonstrationSampler(made, 0, images.load_now).next_batch(8)
    assert batch.images_B is not None and len(batch.images_B) == 8
    for row, placed in enumerate(batch.images_B):
        ids = [*batch.prompt_ids[row], *batch.response_BT[row].tolist()]
        for item in placed:
            assert item.image.pixels_HWC.shape == (56, 56, 3)
            assert set(ids[item.start : item.stop]) == {codec.image_tokens.image_id}


def test_about_half_of_the_demonstrations_guess(folder):
    rows = pq.read_table(folder / "demonstrations.parquet").to_pylist()
    guesses = sum(GUESS_THOUGHT in row["messages"][1]["content"] for row in rows)
    assert 70 < guesses < 130


def test_blank_images_are_for_the_task_with_images():
    assert TaskSettings(task=GeneratedTask.vision, blank_images=True).blank_images
    with pytest.raises(InputError) as caught:
        TaskSettings(task=GeneratedTask.calls, blank_images=True)
    assert caught.value.name == "blank_images"


def test_with_tags_an_image_follows_the_assistants_text(folder, codec, reader):
    conversations = read_conversations(folder / "demonstrations.parquet", images=reader)
    zooming = next(item for item in conversations if len(item.messages) == 4)
    (item,) = encode_demonstrations([zooming], codec)
    inline = codec.decode_with_special_tokens(item.response_ids)
    assert f"</tool_call><|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>Region [" in inline
    assert inline.count("<|im_end|>") == 1 and inline.endswith("<|im_end|>")
    answer = len(codec.encode(zooming.messages[-1]["content"])) + 1
    assert item.loss_mask[-answer:] == (1,) * answer and item.loss_mask[-answer - 1] == 0
