"""Composes and checks the configuration as `python -m mega_agentrl` does, without starting it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.override_keys import (
    check_overrides,
    check_yaml_keys,
    compose_settings,
    register_schema,
)
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.estimate.preflight.suggestions import with_overrides

_FILES = ("data.train", "data.validation", "sft.train_data", "sft.dev_data")
_OPTIONAL_FILES = (
    "data.prompt_template",
    "tool.user_tools_file",
    "tool.mcp",
    "rollout.interaction_config_file",
)


def compose_overrides(overrides: Sequence[str]) -> DictConfig:
    """Compose `configs/train.yaml` with Hydra overrides.

    Raises:
        ValueError: an unknown key or a value of a wrong type. Hydra raises its own errors for
            anything else.
    """
    register_schema()
    folder = find_config_dir()
    check_yaml_keys(folder)
    check_overrides(overrides, folder)
    return compose_settings(overrides, folder)


def compose_config(overrides: Sequence[str], *, model_path: str | None = None) -> TrainConfig:
    """Compose the run's configuration.

    Args:
        overrides: Hydra overrides.
        model_path: replaces `model.path` if given.

    Raises:
        ValueError: an unknown key, a value out of range or of a wrong type, or no `model.path`.
            Hydra raises its own errors for anything else.
    """
    composed = compose_overrides(overrides)
    if model_path is not None:
        composed.model.path = model_path
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    if not config.model.path:
        raise ValueError(
            "model.path is empty: expected a Hugging Face checkpoint folder (its config.json is "
            "enough here), or --model-config FILE"
        )
    return config


def make_config_only_folder(config_json: Path, folder: Path) -> str:
    """Create a checkpoint folder with only a config.json below `folder`; return its path."""
    if not config_json.is_file():
        raise ValueError(f"--model-config {config_json}: no such file")
    model_folder = folder / config_json.stem
    model_folder.mkdir()
    shutil.copy(config_json, model_folder / "config.json")
    return str(model_folder)


def make_config_check(folder: Path, *, files: bool) -> Callable[[TrainConfig], None]:
    """Return the run's configuration check.

    Args:
        folder: folder for an empty stand-in file.
        files: whether the files that the configuration names, and bubblewrap, must exist, and
            `run_dir` be writable.
    """
    if files:
        return check_config
    empty = folder / "stand-in"
    empty.touch()

    def check_rest(config: TrainConfig) -> None:
        stand_ins = dict.fromkeys(_FILES, str(empty)) | dict.fromkeys(_OPTIONAL_FILES, "")
        stand_ins["run_dir"] = str(folder)
        if config.tool.search.backend is SearchBackend.local:
            stand_ins["tool.search.source"] = ""
        check_config(with_overrides(config, stand_ins | {"tool.python.num_hosts": 1}))

    return check_rest
