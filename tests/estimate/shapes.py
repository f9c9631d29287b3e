"""The shapes of released models, from the configurations beside the tools."""

from __future__ import annotations

import json
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


def write_model_config(folder, name="qwen2.5-7b", **changes):
    """Write the configuration of a released model into a folder without weights; return it."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return str(folder)
