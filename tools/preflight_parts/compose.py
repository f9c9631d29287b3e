"""The configuration as `python -m mega_agentrl` composes it, and its check, on a login node."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from mega_agentrl.config.check import check
from mega_agentrl.config.choices import SearchSource
from mega_agentrl.config.keys import check_files, check_overrides
from mega_agentrl.config.places import config_folder, folder_name
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.estimate.change import changed

_FILES = ("data.train", "data.validation", "sft.data", "sft.dev")
_OPTIONAL_FILES = ("data.template", "tool.file", "rollout.interaction_file")


def compose_config(overrides: Sequence[str], *, model_path: str | None = None) -> TrainConfig:
    """The run's configuration. model_path: instead of `model.path`.

    Raises `ValueError` for names and ranges, Hydra's and OmegaConf's errors for values.
    """
    ConfigStore.instance().store(name="schema", node=TrainConfig)
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    folder = config_folder()
    check_files(folder)
    check_overrides(overrides, folder)
    with initialize_config_dir(str(folder), version_base="1.3"):
        composed = compose("train", list(overrides))
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


def model_folder(config_json: Path, folder: Path) -> str:
    """A checkpoint folder with nothing but a configuration, made below `folder`."""
    if not config_json.is_file():
        raise ValueError(f"--model-config {config_json}: there is no such file")
    place = folder / config_json.stem
    place.mkdir()
    shutil.copy(config_json, place / "config.json")
    return str(place)


def checker(folder: Path, *, files: bool) -> Callable[[TrainConfig], None]:
    """The configuration's check; without `files` those it names, and bubblewrap, may be absent.

    folder: for an empty file that stands in their place.
    """
    if files:
        return check
    empty = folder / "stand-in"
    empty.touch()

    def check_rest(config: TrainConfig) -> None:
        stand_ins = dict.fromkeys(_FILES, str(empty)) | dict.fromkeys(_OPTIONAL_FILES, "")
        if config.tool.search.backend is SearchSource.local:
            stand_ins["tool.search.source"] = ""
        check(changed(config, stand_ins | {"tool.python.hosts": 1}))

    return check_rest
