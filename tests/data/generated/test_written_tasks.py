"""What a task's writer leaves fits the task's experiment and can be written again."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.data.calls import demonstrations as calls
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.settings import GeneratedTask, is_written
from mega_agentrl.data.orders import demonstrations as orders
from mega_agentrl.data.prompt_images import PromptImageReader
from mega_agentrl.data.sft_dataset import encode_demonstrations, read_conversations
from mega_agentrl.data.vision_qa import demonstrations as vision
from mega_agentrl.vision.processor import ImageProcessor

VOCABULARIES = {
    GeneratedTask.calls: calls.VOCABULARY,
    GeneratedTask.orders: orders.VOCABULARY,
    GeneratedTask.vision: vision.VOCABULARY,
}
TASKS = pytest.mark.parametrize("task", list(VOCABULARIES), ids=str)


@TASKS
def test_demonstrations_fit_the_experiment_and_end_in_eos(task, task_folder, tmp_path):
    folder = task_folder(task)
    codec = HFCodec(folder / "model")
    limits = OmegaConf.load(find_config_dir() / "experiment" / f"smoke_{task}.yaml")
    images = None
    if codec.image_tokens is not None:
        processor = ImageProcessor(folder / "model", max_pixels=limits.data.max_pixels)
        images = PromptImageReader(DataConfig(), processor, cache_folder=tmp_path)
    conversations = read_conversations(folder / "demonstrations.parquet", images=images)
    made = encode_demonstrations(
        conversations,
        codec,
        max_tokens=limits.engine.max_model_len,
        tool_messages=task is GeneratedTask.vision,
    )
    assert len(made) == 200
    assert max(len(item.prompt_ids) for item in made) <= limits.data.max_prompt_tokens
    assert max(len(item.response_ids) for item in made) <= limits.rollout.max_response_tokens
    assert all(item.response_ids[-1] == codec.eos_id for item in made)


@TASKS
def test_fixed_parts_are_single_tokens_that_survive_decoding(task, task_folder):
    codec = HFCodec(task_folder(task) / "model")
    for text in VOCABULARIES[task].tokens:
        token_id = codec.added_token_id(text)  # `encode` makes plain text of tags
        if token_id is None:
            (token_id,) = codec.encode(text)
        assert codec.decode([token_id]) == text


@TASKS
def test_rewriting_gives_the_same_bytes(task, task_folder, write_task, tmp_path):
    settings = write_task(task, tmp_path)
    assert is_written(task_folder(task), settings)
    for name in task.output_files:
        assert (task_folder(task) / name).read_bytes() == (tmp_path / name).read_bytes(), name
