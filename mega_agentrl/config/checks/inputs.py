"""Check files, prompts, rewards and trackers against the rest of a configuration.

Part of `check_config`. Remote files are not checked here. With a user dataset class, `data.train`
may be anything. Checks that need the tools or the rows of the data are in `reward` and `data`.
"""

from __future__ import annotations

import os
import os.path
import shutil
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.checks.parallel import has_images
from mega_agentrl.config.declarations import check_keyword_function
from mega_agentrl.config.enums import (
    Branching,
    FilterMetric,
    SandboxIsolation,
    SearchBackend,
    TrackerName,
    Truncation,
)
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import parse_data_files
from mega_agentrl.config.sections.reward import (
    FUNCTION_EXPECTED,
    FUNCTION_NAME,
    KNOWN_FUNCTION_ARGUMENTS,
    MODEL_PART,
)
from mega_agentrl.config.sections.tools import HOST_ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.config.sections.runtime import ReportConfig

OPTIONAL_TRACKERS = (TrackerName.wandb, TrackerName.mlflow)
"""Trackers that need an optional package of the same name."""
_CUTTING_MODES = (Truncation.left, Truncation.right, Truncation.middle)


def check_files(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first file that is missing."""
    check_data(config)
    needed: dict[str, str] = {}
    if config.sft.max_steps:
        needed |= {"sft.train_data": config.sft.train_data, "sft.dev_data": config.sft.dev_data}
    if config.tool.search.backend is SearchBackend.local and config.tool.search.source:
        needed["tool.search.source"] = config.tool.search.source
    if config.tool.user_tools_file:
        needed["tool.user_tools_file"] = config.tool.user_tools_file
    if config.tool.mcp:
        needed["tool.mcp"] = config.tool.mcp
    if config.rollout.interaction_config_file:
        needed["rollout.interaction_config_file"] = config.rollout.interaction_config_file
    for key, value in needed.items():
        _check_file_exists(key, value)
    check_workspace(config)
    check_run_dir(config.run_dir)


def check_workspace(config: TrainConfig) -> None:
    """Raise a `ConfigError` if a folder of the workspaces is missing."""
    workspace = config.tool.workspace
    folders = {
        "tool.workspace.root": "" if workspace.root == HOST_ROOT else workspace.root,
        "tool.workspace.folder": workspace.folder if workspace.is_enabled else "",
    }
    for key, value in folders.items():
        if value and not os.path.exists(value):
            raise ConfigError(key, value, "an existing folder", "a path of another machine")


def check_data(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition on `data.*` that `config` violates."""
    data = config.data
    for key, value in (("data.train", data.train), ("data.validation", data.validation)):
        files = parse_data_files(value, key)
        if not files and key == "data.train":
            _check_file_exists(key, "")
        for file in files:
            if file.local_path is not None and not data.dataset_class:
                _check_file_exists(key, file.local_path)
    needs_questions = config.is_eval_only or config.evaluate.every_steps > 0
    if needs_questions and not parse_data_files(data.validation, "data.validation"):
        raise ConfigError(
            "data.validation",
            data.validation,
            "a file with the questions of the evaluation, because nothing is trained"
            if config.is_eval_only
            else f"a file with questions, or evaluate.every_steps={config.evaluate.every_steps} "
            "set to 0",
            "the setting was left empty",
        )
    if data.prompt_template:
        _check_file_exists("data.prompt_template", data.prompt_template)
    source = config.rollout.source_of_contexts
    if data.truncation in _CUTTING_MODES and source:
        raise ConfigError(
            "data.truncation",
            data.truncation,
            f"error or drop with {source}, which renders all messages of the prompt",
            "only one of the two was changed",
        )


def check_images(config: TrainConfig, model: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if images are asked for that the model or the rollout cannot show.

    `model` is the model's config.json.
    """
    settings = {
        "tool.zoom.enabled": config.tool.zoom.enabled,
        "data.min_pixels": config.data.min_pixels,
        "data.max_pixels": config.data.max_pixels,
    }
    for key, value in settings.items():
        if value and not has_images(model):
            raise ConfigError(
                key,
                value,
                f"{'false' if key.startswith('tool') else 'null'} for a model of text: the "
                "config.json of model.path has no vision_config",
                "settings of another model",
            )
    if config.tool.zoom.enabled and config.rollout.branching is Branching.released:
        raise ConfigError(
            "tool.zoom.enabled",
            True,
            "false with rollout.branching=released, which cuts answers to length as ARPO's "
            "published code does",
            "a preset of ARPO's published code; use rollout.branching=after_result",
        )
    longest = isqrt(config.data.max_image_pixels)
    if config.tool.zoom.enabled and config.tool.zoom.max_side > longest:
        raise ConfigError(
            "tool.zoom.max_side",
            config.tool.zoom.max_side,
            f"at most {longest}, so that a square region has no more pixels than "
            f"data.max_image_pixels={config.data.max_image_pixels}, the bound of every image",
            "only one of the two was changed",
        )


def check_run_dir(run_dir: str) -> None:
    """Raise a `ConfigError` unless the folder of the run exists or can be created."""
    path = Path(run_dir)
    # `os.path` and not `Path`, whose `exists` raises for a folder that may not be read.
    existing = next((item for item in (path, *path.parents) if os.path.lexists(item)), Path())
    expected = "a new or existing folder in which files can be created"
    if not os.path.isdir(existing):
        raise ConfigError("run_dir", run_dir, expected, f"a mistyped path: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        cause = f"this user may not write in {existing}, or its file system is read-only"
        raise ConfigError("run_dir", run_dir, expected, cause)


def _check_file_exists(key: str, value: str) -> None:
    if not value:
        raise ConfigError(key, value, "a file", "the setting was left empty")
    if not os.path.isfile(value):  # `Path.is_file` raises an error for a name that is too long
        raise ConfigError(
            key,
            value,
            f"an existing file, as a path below {Path.cwd()} or an absolute path",
            "the file has not been created yet (`make smoke` creates those under runs/toolqa), or "
            "the working folder is another",
        )


def check_reward(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition on `reward.*` that `config` violates."""
    reward = config.reward
    for name, path in reward.functions.items():
        if name not in reward.part_names:
            raise ConfigError(
                f"reward.functions.{name}",
                path,
                f"a part of reward.rubric ({', '.join(reward.part_names)}) as its name",
                "a mistyped name or a missing weight",
            )
        check_keyword_function(
            path,
            f"reward.functions.{name}",
            FUNCTION_EXPECTED,
            default_name=FUNCTION_NAME,
            keywords=KNOWN_FUNCTION_ARGUMENTS,
        )
    if reward.worker_env_vars and not reward.functions:
        raise ConfigError(
            "reward.worker_env_vars",
            list(reward.worker_env_vars),
            "none without reward.functions, whose worker processes see them",
            "the API key of a reward model, which is set by reward.model.api_key_env",
        )
    if reward.model.prompt_file:
        _check_file_exists("reward.model.prompt_file", reward.model.prompt_file)
    if reward.hosts_reward_model:
        _check_hosted_reward_model(reward)
        _check_filter(config)


def _check_hosted_reward_model(reward: RewardConfig) -> None:
    folder = reward.model.path_or_url
    if not os.path.isfile(Path(folder) / "config.json"):
        raise ConfigError(
            "reward.model.path_or_url",
            folder,
            "a Hugging Face checkpoint folder with a config.json, or a URL that starts with "
            "http:// or https://",
            "a mistyped path, or a URL without http://",
        )
    if reward.model.api_key_env:
        raise ConfigError(
            "reward.model.api_key_env",
            reward.model.api_key_env,
            "none with a folder as reward.model.path_or_url",
            "only the URL was replaced",
        )


def _check_filter(config: TrainConfig) -> None:
    """Check that the filter needs no hosted reward model, which scores whole batches later."""
    metric, rubric = config.rollout.filter_metric, config.reward.weights_by_source
    sources = [source for source, parts in rubric.items() if next(iter(parts)) == MODEL_PART]
    if metric is FilterMetric.reward or (metric is FilterMetric.accuracy and sources):
        expected = f"none ({MODEL_PART} decides {', '.join(sources)})" if sources else "accuracy"
        raise ConfigError(
            "rollout.filter_metric",
            metric,
            f"{expected} with a reward model in a folder, which scores whole batches after groups "
            "have been filtered",
            "a filter of another rubric; only a reward model behind a URL scores before the filter",
        )


def check_report(report: ReportConfig) -> None:
    """Raise a `ConfigError` for a tracker whose package is not installed, without importing it."""
    for name in report.trackers:
        if name in OPTIONAL_TRACKERS and find_spec(name.value) is None:
            raise ConfigError(
                "report.trackers",
                name,
                f"the package {name} in this environment (`pip install {name}`)",
                f"an optional package that is not installed; or remove {name} from report.trackers",
            )


def check_bubblewrap(config: TrainConfig) -> None:
    """Raise a `ConfigError` if sandboxes run on this machine and bubblewrap is not installed.

    Sandboxes on other nodes check this when they start.
    """
    python = config.tool.python
    if python.isolation is not SandboxIsolation.bubblewrap or python.num_hosts:
        return
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "tool.python.isolation",
            python.isolation,
            "the program bwrap on PATH, which isolates the Python tool",
            "bubblewrap is not installed (Debian, Ubuntu: `apt-get install bubblewrap`, or "
            "`make env`)",
        )
