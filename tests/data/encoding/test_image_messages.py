"""Conversations with images: pieces add up to the whole rendering, text stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.data.encoding import parallel_encode
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.encoding.parallel_encode import encode_conversations
from mega_agentrl.data.rl_dataset import UnencodedPrompt, encode_prompts
from mega_agentrl.types.images import ImageInput
from mega_agentrl.vision.placeholders import image_parts, locate_images
from tests.chat_models import TEMPLATES, save_tokenizer, save_vision_folder
from tests.config.refusals import refused_setting
from tests.fakes import make_prompt


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_vision_folder(tmp_path_factory.mktemp("model")))


def make_image(rows, columns):
    return ImageInput(
        image_id=f"{rows}/{columns}",
        width=28 * columns,
        height=28 * rows,
        grid_thw=(1, 2 * rows, 2 * columns),
        merge_size=2,
    )


TEXTS = st.text(max_size=8) | st.sampled_from(["<image>", "<|image_pad|>", "<|im_end|>", "é"])
IMAGES = st.builds(make_image, st.integers(1, 3), st.integers(1, 3))
PARTS = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS)
    | st.builds(lambda image: {"type": "image", "image": image}, IMAGES),
    min_size=1,
    max_size=4,
)


def message(role):
    return st.builds(lambda content: {"role": role, "content": content}, TEXTS | PARTS)


@settings(max_examples=60, deadline=None)
@given(message("user"), st.lists(st.tuples(st.text(max_size=5), message("tool")), max_size=3))
def test_turns_add_up_to_the_whole_rendering(codec, question, turns):
    """Prompt, sampled text and next turns, piece by piece, are the template's whole rendering."""
    messages = [question]
    ids = codec.apply_chat_template(messages)
    for text, answer in turns:
        ids += [*codec.encode(text), codec.eos_id, *codec.encode_next_turn([answer])]
        messages += [{"role": "assistant", "content": text}, answer]
    assert ids == codec.apply_chat_template(messages)
    placed = locate_images(ids, image_parts(messages), codec.image_tokens.image_id)
    starts = [ids[item.start - 1] for item in placed]
    assert starts == [codec.image_tokens.start_id] * len(placed)
    assert ids.count(codec.image_tokens.start_id) == len(placed)


def test_a_chunk_with_images_is_encoded_alike_after_the_way_to_another_process(codec):
    content = [
        {"type": "image", "image": make_image(2, 3)},
        {"type": "text", "text": "what?"},
    ]
    conversations = [([{"role": "user", "content": content}], ()), ([message_of("hi")], ())]
    expected = encode_conversations(codec, conversations, key="data.train")
    assert expected[0].count(codec.image_tokens.image_id) == 6
    (chunk,) = parallel_encode._iter_chunks(conversations)
    received = json.loads(json.dumps(chunk))
    assert parallel_encode.encode_chunk(str(codec.folder), received) == expected


def message_of(text):
    return {"role": "user", "content": text}


def test_the_template_of_an_older_folder_is_in_the_processors_file(tmp_path):
    folder = save_vision_folder(tmp_path)
    template = (TEMPLATES / "qwen25vl.jinja").read_text()
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen25.jinja").read_text())
    assert refused_setting(HFCodec, folder) == ("model.path", str(folder / "chat_template.json"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    content = [{"type": "image", "image": make_image(1, 2)}]
    codec = HFCodec(folder)
    ids = codec.apply_chat_template([{"role": "user", "content": content}])
    assert ids.count(codec.image_tokens.image_id) == 2


def test_a_template_that_ignores_tools_is_refused_where_prompts_have_some(tmp_path):
    """The folder has two templates, as published ones do: one renders tools, the other images."""
    folder = save_vision_folder(tmp_path)
    template = (TEMPLATES / "qwen25vl.jinja").read_text()
    assert HFCodec(folder).renders_tools
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen25.jinja").read_text())
    without_tools = template.replace("if tools", "if false")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": without_tools}))
    codec = HFCodec(folder)
    prompt = UnencodedPrompt(make_prompt(token_ids=()), "row 0", "a.parquet", 1.0, b"")
    assert encode_prompts([prompt], codec, DataConfig(), key="data.train").prompts
    schemas = {"add": {"type": "function", "function": {"name": "add", "parameters": {}}}}
    with pytest.raises(ConfigError) as caught:
        encode_prompts([prompt], codec, DataConfig(), key="data.train", tool_schemas=schemas)
    assert (caught.value.key, caught.value.got) == ("model.path", str(folder.resolve()))
    assert "chat_template.jinja" in caught.value.cause
    (folder / "chat_template.jinja").write_text(template)
    codec = HFCodec(folder)
    assert encode_prompts([prompt], codec, DataConfig(), key="data.train", tool_schemas=schemas)


def test_tokens_of_images_must_be_special(tmp_path):
    folder = save_vision_folder(tmp_path)
    save_tokenizer("qwen25", folder)
    with pytest.raises(ConfigError) as caught:
        HFCodec(folder)
    assert caught.value.key == "model.path"
