"""Adapters as a PEFT folder, which PEFT and vLLM load: `adapter_config.json` and one weight file.

Tensors have PEFT's names, `base_model.model.NAME.lora_A.weight` and `...lora_B.weight`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest
from mega_agentrl.actor.checkpoint.sharded_state import WEIGHT, state_key
from mega_agentrl.actor.checkpoint.torch_dist_reader import read_tensors
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_json, reading
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.lora_layout import lora_shapes
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.types.atomic_file import atomic_path, atomic_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.layout import ShardLayout

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def convert_checkpoint_to_peft(checkpoint: Path, model: Path, target: Path) -> None:
    """Write the adapters of a checkpoint as a PEFT folder, in a single process.

    Args:
        checkpoint: Checkpoint of a run with adapters.
        model: Hugging Face folder that training started from.
        target: Folder to write.

    Raises:
        ValueError: If the checkpoint is of another model or has no adapters.
    """
    manifest, shape = CheckpointManifest.read(checkpoint), ModelShape.from_folder(model)
    manifest.require_shape(checkpoint, shape, str(model))
    lora = manifest.lora
    if lora is None:
        raise InputError(
            f"contents of {checkpoint}", "all weights", "adapters", "a run with model.lora.rank=0"
        )
    shapes = lora_shapes(hf_shapes(shape), lora["rank"], lora["targets"])
    dtype = getattr(torch, manifest.dtype)
    state = {
        state_key(WEIGHT, name): torch.empty(full_shape, dtype=dtype)
        for name, full_shape in shapes.items()
    }
    read_tensors(state, checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    with atomic_path(target / WEIGHTS_FILE) as temporary:
        tensors = {f"{_PREFIX}{name}": state[state_key(WEIGHT, name)] for name in shapes}
        save_file(tensors, temporary, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(lora["targets"]),
    }
    atomic_write(target / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")


def check_peft_folder(lora: LoraConfig) -> None:
    """Raise a `ConfigError` if the adapters of `model.lora.path` are not those of the settings."""
    path = Path(lora.path) / CONFIG_FILE
    settings = read_json(path, "model.lora.path", "the settings of a PEFT adapter")
    for key, stored, own in (
        ("model.lora.rank", settings.get("r"), lora.rank),
        ("model.lora.alpha", settings.get("lora_alpha"), lora.alpha),
        ("model.lora.targets", sorted(settings.get("target_modules") or ()), sorted(lora.targets)),
    ):
        if stored != own:
            raise ConfigError(
                key, own, f"{stored}, as in {path}", "settings for other adapters than those"
            )


def read_peft_folder(
    lora: LoraConfig,
    layout: Sequence[ShardLayout],
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, torch.Tensor],
) -> None:
    """Fill a rank's parameters of adapters from `model.lora.path`.

    Args:
        lora: Settings of the adapters.
        layout: The parameters of the adapters.
        shapes: Full shapes of their tensors.
        parameters: All parameters by name, written in place.

    Raises:
        ConfigError: The folder has adapters with other settings.
        ValueError: A tensor is missing or of another shape.
    """
    check_peft_folder(lora)
    path = Path(lora.path) / WEIGHTS_FILE
    with (
        reading("model.lora.path", path, "the weights of a PEFT adapter"),
        safe_open(path, framework="pt") as file,
    ):
        names = set(file.keys())
        for shard in layout:
            (block,) = shard.blocks
            name = f"{_PREFIX}{block.hf_name}"
            view = file.get_slice(name) if name in names else None
            got = None if view is None else tuple(view.get_shape())
            if view is None or got != shapes[block.hf_name]:
                raise InputError(
                    f"shape of {name} in {path}",
                    got,
                    str(shapes[block.hf_name]),
                    "adapters of another model",
                )
            parameters[shard.name].detach().copy_(view[block.hf_rect.slices])
