"""The preflight reads prompts with images as the run does, but nothing from the network."""

from __future__ import annotations

import json

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import ModelConfig
from tests.chat_models import save_vision_folder
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
