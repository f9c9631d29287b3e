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
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelShape.from_folder(folder)
