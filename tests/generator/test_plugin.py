"""Registration, and processes that end with another; a whole engine is killed in `tests/e2e`."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm")

from mega_agentrl.generator import plugin, processors_without_torchvision
from mega_agentrl.generator.processors_without_torchvision import (
    NoVideoProcessor,
    replace_torchvision_processors,
)
from tests.generator.vision_model import write_vision_model

WATCHER = """
import sys, time
from mega_agentrl.generator.plugin import die_with_process
die_with_process(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(60)
"""


def test_vllm_finds_the_plugin_and_the_backend():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    (entry,) = entry_points(group="vllm.general_plugins", name="mega_agentrl")
    entry.load()()
    plugin.register()
    loader = WeightTransferEngineFactory._registry[plugin.WEIGHT_TRANSFER_BACKEND]
    assert loader().__name__ == "ReshardTransferEngine"


@pytest.mark.parametrize(
    ("family", "class_name"),
    [("qwen2_5_vl", "Qwen2_5_VLProcessor"), ("qwen3_vl", "Qwen3VLProcessor")],
    ids=["qwen2_5_vl", "qwen3_vl"],
)
def test_processors_load_without_torchvision(family, class_name, tmp_path):
    import transformers

    assert not transformers.utils.is_torchvision_available()
    replace_torchvision_processors()
    folder = write_vision_model(family, tmp_path)
    processor = getattr(transformers, class_name).from_pretrained(folder)
    assert isinstance(processor.video_processor, NoVideoProcessor)
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assert smart_resize(30, 55, factor=28, min_pixels=28 * 28) == (28, 56)


def test_nothing_is_replaced_where_torchvision_is_installed(monkeypatch):
    monkeypatch.setattr(processors_without_torchvision, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(processors_without_torchvision, "processing_utils", None)
    replace_torchvision_processors()


def test_a_process_ends_with_the_one_it_watches():
    host = subprocess.Popen(["sleep", "60"])
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(host.pid)], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout.readline() == "watching\n"
    host.kill()
    host.wait()
    assert watcher.wait(120) == -signal.SIGKILL


def test_watching_a_process_that_is_gone_ends_at_once():
    host = subprocess.Popen(["true"])
    host.wait()
    watcher = subprocess.run([sys.executable, "-c", WATCHER, str(host.pid)], timeout=300)
    assert watcher.returncode == -signal.SIGKILL
