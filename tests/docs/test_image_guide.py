"""The examples of the guide to images work as they stand there."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from PIL import Image

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.prompt_images import PromptImageReader
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.vision.placeholders import content_text
from mega_agentrl.vision.processor import ImageProcessor
from tests.vision_models import make_picture, write_preprocessor_config

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "own_images.md").read_text()


def block(language):
    return re.search(rf"```{language} \S+\n(.*?)```", GUIDE, re.S)[1]


def test_the_row_becomes_a_prompt(tmp_path):
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "7.png").write_bytes(make_picture(0))
    row = json.loads(block("json"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    write_preprocessor_config(tmp_path)
    config = DataConfig()
    reader = PromptImageReader(config, ImageProcessor(tmp_path), cache_folder=None)
    files = [DataFile(str(tmp_path / "rows.jsonl"))]
    (found,) = read_prompts(files, config, key="data.train", images=reader)
    text = content_text(found.prompt.messages[0]["content"])
    assert text == "[image 56 x 28]What is the largest bar?"


async def test_the_tool_is_the_example_and_rotates(tmp_path):
    assert block("python") == (ROOT / "examples" / "my_image_tool.py").read_text()
    kit = ToolKit(load_user_tools(ROOT / "examples" / "my_image_tools.yaml"))
    write_preprocessor_config(tmp_path)
    session = kit.open_session()
    await session.create({})
    session.show_images([ImageProcessor(tmp_path).measure(make_picture(0, 56, 28))])
    (call,) = kit.parse_calls('<rotate>{"image": 1, "degrees": 90}</rotate>')
    outcome = await session.execute(call.tool, call.arguments)
    assert outcome.answer == "Rotated by 90 degrees."
    before = Image.open(io.BytesIO(make_picture(0, 56, 28)))
    (data,) = outcome.images
    after = Image.open(io.BytesIO(data))
    assert after.size == (28, 56) and after.getpixel((27, 0)) == before.getpixel((0, 0))
    same = await session.execute("rotate", {"image": 1.0, "degrees": 90})
    assert same.images == outcome.images
