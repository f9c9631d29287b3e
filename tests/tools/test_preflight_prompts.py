"""The preflight reads prompts with images as the run does, but nothing from the network."""

from __future__ import annotations

import json

import pytest

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import ModelConfig
from tests.chat_models import TEMPLATES, save_vision_folder
from tests.vision_models import make_picture
from tools.preflight_parts.prompts import inspect_prompts


@pytest.fixture
def config(tmp_path):
    """A run on one prompt with the image `a.png`."""
    (tmp_path / "a.png").write_bytes(make_picture(0))
    path = tmp_path / "train.jsonl"
    write_row(path, "a.png")
    folder = tmp_path / "model"
    folder.mkdir()
    save_vision_folder(folder)
    return TrainConfig(model=ModelConfig(path=str(folder)), data=DataConfig(train=str(path)))


def write_row(path, image):
    row = {
        "prompt": [{"role": "user", "content": "<image>What is it?"}],
        "images": [image],
        "data_source": "pictures",
        "reward_model": {"ground_truth": "noise"},
    }
    path.write_text(json.dumps(row))


def test_images_at_urls_are_a_note(config, tmp_path):
    (file,), problems, _ = inspect_prompts(config)
    assert file.num_prompts == 1 and problems == []
    write_row(tmp_path / "train.jsonl", "https://nowhere.example/a.png")
    files, problems, (note,) = inspect_prompts(config)
    assert files == problems == []
    assert note.startswith("data.train: images at URLs")


def test_a_template_that_ignores_tools_is_a_problem(config, tmp_path):
    config.rollout.call_protocol = CallProtocol.hermes
    config.tool.zoom.enabled = True
    config.data.max_prompt_tokens = 10_000
    assert inspect_prompts(config)[1] == []
    template = (TEMPLATES / "qwen25vl.jinja").read_text().replace("if tools", "if false")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    _, (problem,), _ = inspect_prompts(config)
    assert problem.config_key == "data.train" and "chat_template.jinja" in problem.message
