"""The shapes of released models, from the configurations beside the tools."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from mega_agentrl.reshard.mapping.model_shape import ModelShape

CONFIGS = Path(__file__).resolve().parents[2] / "tools" / "model_configs"


@cache
def released(name, **changes):
    """`released("qwen3-32b", num_hidden_layers=2)`."""
    with tempfile.TemporaryDirectory() as folder:
        return ModelShape.from_folder(write_model_config(folder, name, **changes))


@cache
def config_folder(name="qwen2.5-7b"):
    """Return a folder with the configuration of a released model; it lasts as long as the tests."""
    folder = Path(tempfile.mkdtemp(prefix="model-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_model_config(folder, name)


def write_model_config(folder, name="qwen2.5-7b", **changes):
    """Write the configuration of a released model into a folder without weights; return it."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return str(folder)
