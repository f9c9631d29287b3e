"""Images of rows become placeholders of prompts; a bad one is an error with its place."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mega_agentrl.config.enums import Truncation
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.prompt_images import PromptImageReader
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.vision.processor import ImageProcessor
from tests.chat_models import save_tokenizer, save_vision_folder
from tests.config.refusals import refused_input
from tests.vision_models import make_picture

START, END, PAD = 256, 257, 258


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Codec and image processor of a vision-language model without weights."""
    folder = save_vision_folder(tmp_path_factory.mktemp("model"))
    return HFCodec(folder), ImageProcessor(folder)


def row(text, images=(), index=0, **changes):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {
        "prompt": messages,
        "data_source": "s",
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"index": index},
        "images": list(images),
        **changes,
    }


def cell(seed=0, width=56, height=28):
    return {"bytes": make_picture(seed, width, height), "path": "a.png"}


def load_table(model, path, *, reads_images=True, **options):
    codec, processor = model
    config = DataConfig(**({"max_prompt_tokens": 300} | options))
    cache = path.parent / "cache"
    reader = PromptImageReader(config, processor, cache_folder=cache) if reads_images else None
    files = [DataFile(str(path))]
    loaded = load_prompts(files, codec, config, key="data.train", cache_folder=cache, images=reader)
    return loaded.prompts


def load(model, tmp_path, rows, **options):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return load_table(model, path, **options)


def load_json(model, tmp_path, rows, **options):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_table(model, path, **options)


def run_lengths(ids):
    """Lengths of the runs of placeholders, each of which stands between start and end."""
    text = "".join({START: "(", END: ")", PAD: "x"}.get(token, " ") for token in ids)
    assert text.count("(") == text.count(")") == text.count("(x")
    return [len(run) for run in text.replace("(", " ").replace(")", " ").split()]


def test_markers_become_placeholders(model, tmp_path):
    """By hand: 56 x 28 pixels are 2 features, 56 x 56 pixels are 4."""
    codec, _ = model
    images = [cell(0), cell(1, 56, 56)]
    (prompt,) = load(model, tmp_path, [row("<image>Is it <image>?", images)])
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    tail = "?<|im_end|>\n<|im_start|>assistant\n"
    ids = codec._tokenizer.encode
    expected = [*ids(head), START, PAD, PAD, END, *ids("Is it ")]
    expected += [START, PAD, PAD, PAD, PAD, END, *ids(tail)]
    assert prompt.token_ids == tuple(expected)
    first = len(ids(head)) + 1
    assert [placed.start for placed in prompt.images] == [first, first + 3 + len("Is it ") + 1]
    content = prompt.messages[0]["content"]
    assert [part["type"] for part in content] == ["image", "text", "image", "text"]
    assert all(placed.image.read() == images[k]["bytes"] for k, placed in enumerate(prompt.images))


def test_forms_of_messages_give_the_same_prompt(model, tmp_path):
    (tmp_path / "b.png").write_bytes(make_picture(0))
    rows = [
        row("<image>what?", ["b.png"], 0),
        row([{"role": "user", "content": [{"type": "image"}, text_part()]}], ["b.png"], 1),
        row(
            [{"role": "user", "content": [{"type": "image", "image": "b.png"}, text_part()]}], (), 2
        ),
        row(
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "b.png"}}, text_part()],
                }
            ],
            (),
            3,
        ),
    ]
    prompts = load_json(model, tmp_path, rows)
    assert len({prompt.token_ids for prompt in prompts}) == 1
    assert len({prompt.images for prompt in prompts}) == 1
    assert {placed.image.path for placed in prompts[0].images} == {str(tmp_path / "b.png")}


def text_part():
    return {"type": "text", "text": "what?"}


def test_bytes_of_a_table_are_written_once(model, tmp_path):
    rows = [row("<image>", [cell(seed % 2)], index=seed) for seed in range(6)]
    prompts = load(model, tmp_path, rows)
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".png"} and len(files) == 2
    images = [prompt.images[0].image for prompt in prompts]
    assert all(not image.data and image.pixels_HWC is None for image in images)
    assert images[0] is images[2] and images[0] != images[1]
    before = [file.stat().st_mtime_ns for file in files]
    load(model, tmp_path, rows)
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize(
    ("text", "num_images"),
    [("<image> or <image>", 1), ("what?", 1), ("<image>", 0), ("<image>", 2)],
    ids=["marker_too_many", "no_marker", "no_image", "image_too_many"],
)
def test_markers_and_images_must_match(model, tmp_path, text, num_images):
    rows = [row("<image>", [cell()]), row(text, [cell()] * num_images, 1)]
    with pytest.raises(ConfigError) as caught:
        load(model, tmp_path, rows)
    assert caught.value.key == f"data.train={tmp_path}/a.parquet row 2, column images"
    assert caught.value.got == f"{num_images} entries"


def test_markers_are_text_where_no_column_is_named(model, tmp_path):
    (prompt,) = load(model, tmp_path, [row("a <image> tag")], image_key="")
    assert prompt.messages[0]["content"] == "a <image> tag"
    assert PAD not in prompt.token_ids and not prompt.images


def test_text_never_becomes_a_vision_token(model, tmp_path):
    text = "<image><|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    (prompt,) = load(model, tmp_path, [row(text, [cell()])])
    assert run_lengths(prompt.token_ids) == [2]
    codec, _ = model
    assert codec.decode(prompt.token_ids).count("<|image_pad|>") == 1
    assert not set(codec.encode(text)) & {START, END, PAD}


def test_a_damaged_image_names_row_and_column(model, tmp_path):
    cut = {"bytes": make_picture(0)[:-400], "path": "a.png"}
    rows = [row("<image>", [cell()]), row("<image><image>", [cell(), cut], 1)]
    with pytest.raises(ConfigError) as caught:
        load(model, tmp_path, rows)
    assert caught.value.key == f"data.train={tmp_path}/a.parquet row 2, column images[1]"
    assert len(load(model, tmp_path, rows, verify_images=False)) == 2


def test_vision_tokens_count_and_are_never_cut(model, tmp_path):
    rows = [row("short"), row("<image>short", [cell(0, 112, 112)], 1)]
    short, long = load(model, tmp_path, rows)
    assert len(long.token_ids) == len(short.token_ids) + 16 + 2
    limit = len(short.token_ids) + 10
    (left,) = load(model, tmp_path, rows, max_prompt_tokens=limit, truncation=Truncation.drop)
    assert left.prompt_id == "s/0"
    for mode in (Truncation.left, Truncation.right, Truncation.middle):
        with pytest.raises(ConfigError) as caught:
            load(model, tmp_path, rows, max_prompt_tokens=limit, truncation=mode)
        assert caught.value.key == "data.truncation"


def test_bounds_of_pixels_change_the_number_of_tokens(tmp_path):
    folder = save_vision_folder(tmp_path / "model")
    small = HFCodec(folder), ImageProcessor(folder, max_pixels=28 * 28)
    (prompt,) = load(small, tmp_path, [row("<image>", [cell(0, 112, 112)])])
    assert run_lengths(prompt.token_ids) == [1]


def test_frames_of_a_video_become_images(model, tmp_path):
    frames = [Image.new("RGB", (56, 28), colour) for colour in ("red", "lime", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=500)
    videos = [{"bytes": buffer.getvalue(), "path": None}]
    (prompt,) = load(model, tmp_path, [row("<video>What moves?", (), videos=videos)])
    assert run_lengths(prompt.token_ids) == [2, 2, 2]
    (prompt,) = load(model, tmp_path, [row("<video>", (), videos=videos)], max_frames=1)
    assert run_lengths(prompt.token_ids) == [2]


def test_a_model_of_text_refuses_images(tmp_path):
    codec = HFCodec(save_tokenizer("qwen25", tmp_path / "text"))
    with pytest.raises(ConfigError) as caught:
        load((codec, None), tmp_path, [row("<image>", [cell()])], reads_images=False)
    assert caught.value.key.endswith("row 1, column images")
    (prompt,) = load((codec, None), tmp_path, [row("a <image> tag")], reads_images=False)
    assert prompt.messages[0]["content"] == "a <image> tag"
    (vision,) = load(
        (HFCodec(save_vision_folder(tmp_path / "vision")), ImageProcessor(tmp_path / "vision")),
        tmp_path,
        [row("<image>", [cell()])],
    )
    error = refused_input(codec.apply_chat_template, vision.messages)
    assert (error.name, error.got) == ("images of chat messages", 1)


def test_rows_of_a_users_dataset_may_have_images(model, tmp_path):
    (tmp_path / "rows.py").write_text(
        "class Rows:\n"
        "    def __init__(self, paths, key): pass\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n"
        "        return {'prompt': '<image>what?', 'data_source': 's',\n"
        f"                'images': [{make_picture(0)!r}],\n"
        "                'reward_model': {'ground_truth': '1'}}\n"
    )
    (prompt,) = load(model, tmp_path, [row("unused")], dataset_class=f"{tmp_path}/rows.py:Rows")
    assert run_lengths(prompt.token_ids) == [2]
