"""Every setting is read by the code, and its range is checked."""

import ast
import copy
import dataclasses
import inspect
import json
from enum import StrEnum
from math import inf, nan
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ValidationError

from mega_agentrl.config import enums, schema
from mega_agentrl.config.override_keys import known_keys
from mega_agentrl.config.schema import TrainConfig
from tests.config.refusals import refused_setting

PACKAGE = Path(schema.__file__).resolve().parents[1]
ENUMS = [
    kind
    for _, kind in inspect.getmembers(enums, inspect.isclass)
    if issubclass(kind, StrEnum) and kind not in (StrEnum, enums.Choice)
]


def attributes_of(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def attributes_read() -> set[str]:
    """Return the names read as attributes anywhere in the package outside `config/`.

    A property of the schema that is read there counts as reading its fields.
    """
    names: set[str] = set()
    properties: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if PACKAGE / "config" not in path.parents:
            names |= attributes_of(tree)
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list
            ):
                properties[node.name] = attributes_of(node)
    return names.union(*(fields for name, fields in properties.items() if name in names))


@pytest.mark.extended
def test_every_leaf_is_read_outside_config():
    read = attributes_read()
    unread = [key for key in known_keys() if key.rsplit(".", maxsplit=1)[-1] not in read]
    assert not unread, f"settings that nothing reads: {', '.join(unread)}"


@pytest.mark.parametrize("kind", ENUMS)
def test_names_of_choices_equal_their_values(kind):
    """Hydra reads enumerations by name."""
    assert len(kind) >= 2
    assert all(member.name == member.value for member in kind)


def test_the_defaults_are_a_valid_configuration_and_plain_values():
    config = OmegaConf.to_object(OmegaConf.structured(TrainConfig))
    assert isinstance(config, TrainConfig)
    json.dumps(dataclasses.asdict(config))


OUT_OF_RANGE = [
    ("total_steps", -1, {}),
    ("save_every_steps", -1, {}),
    ("parallel.tensor", 0, {}),
    ("parallel.virtual_pipeline", 0, {}),
    ("parallel.expert_tensor", 0, {}),
    ("engine.tensor_parallel_size", 0, {}),
    ("engine.max_model_len", 8, {}),
    ("engine.gpu_memory_utilization", 1.0, {}),
    ("rollout.group_size", 0, {}),
    ("rollout.temperature", 0.0, {}),
    ("rollout.top_p", 0.0, {}),
    ("rollout.max_tool_calls", -1, {}),
    ("rollout.trajectory_timeout_s", -1.0, {}),
    ("rollout.trajectory_timeout_s", inf, {}),
    ("rollout.trajectory_timeout_s", 60.0, {"rollout.partial_rollout": True}),
    ("rollout.filter_range", [nan, 0.9], {}),
    ("rollout.filter_range", [0.99, 0.99], {}),
    ("rollout.filter_range", [0.0, inf], {}),
    ("rollout.filter_range", [0.5], {}),
    ("rollout.num_oversampled_prompts", -1, {}),
    ("rollout.min_finished_fraction", 0.0, {}),
    ("rollout.min_finished_fraction", 1.5, {}),
    ("rollout.straggler_timeout_s", -1.0, {}),
    ("rollout.straggler_timeout_s", inf, {}),
    ("rollout.straggler_timeout_s", 0.0, {"rollout.min_finished_fraction": 0.5}),
    ("rollout.branch.alpha", inf, {}),
    ("rollout.branch.beta", nan, {}),
    ("rollout.branch.tau", -inf, {}),
    ("rollout.branch.consecutive_penalty", -0.1, {}),
    ("rollout.branch.consecutive_penalty", 1.1, {}),
    ("rollout.branch.num_probe_tokens", -1, {}),
    ("rollout.branch.initial_rollouts", 0, {}),
    ("rollout.branch.num_forks_per_decision", -1, {}),
    ("rollout.branch.entropy_estimate_top_k", -1, {}),
    ("rollout.branch.entropy_estimate_top_k", 21, {}),
    ("tool.python.num_hosts", -1, {}),
    ("tool.python.num_workers", 0, {}),
    ("tool.python.timeout_s", 0.0, {}),
    ("tool.python.memory_limit_mib", 63, {}),
    ("tool.search.top_k", 0, {}),
    ("tool.search.source", "", {"tool.search.backend": "retrieve"}),
    ("tool.search.source", "host:8000", {"tool.search.backend": "retrieve"}),
    ("tool.search.source", "ftp://host", {"tool.search.backend": "web"}),
    ("tool.web.timeout_s", 0.0, {}),
    ("tool.web.max_calls_per_s", -0.1, {}),
    ("tool.max_response_tokens", 15, {}),
    ("tool.max_response_tokens", 39, {"tool.search.top_k": 10}),
    ("reward.num_workers", 0, {}),
    ("reward.timeout_s", 0.0, {}),
    ("reward.model.served_model_name", "", {"reward.model.path_or_url": "http://host:8000/v1"}),
    ("algo.advantage", "grop", {}),
    ("algo.loss", "clippd", {}),
    ("algo.entropy_advantage_weight", -0.1, {}),
    ("algo.entropy_coef", nan, {}),
    ("algo.rollout_correction_cap", 0.5, {}),
    ("algo.kl_coef", -0.1, {}),
    ("algo.kl_coef", inf, {}),
    ("algo.kl_coef", 0.0, {"algo.kl_target": 0.1}),
    ("algo.kl_target", 0.0, {}),
    ("algo.egpo.lam", -0.1, {}),
    ("algo.egpo.lam", inf, {}),
    ("algo.egpo.alpha", 1.0, {}),
    ("algo.egpo.cot_markers", ["<think>"], {}),
    ("algo.egpo.cot_markers", ["<think>", ""], {}),
    ("algo.ares.bootstrap", True, {}),
    ("algo.ares.skip_mastered", True, {}),
    ("optim.lr", -1.0, {}),
    ("optim.min_lr", 1e-2, {}),
    ("optim.grad_clip", 0.0, {}),
    ("optim.critic_lr", -1.0, {}),
    ("optim.critic_warmup_steps", -1, {}),
    ("optim.lr_warmup_steps", -1, {}),
    ("sft.max_steps", -1, {}),
    ("sft.target_success_rate", 1.5, {}),
    ("data.prompts_per_step", 0, {}),
    ("data.max_prompt_tokens", 0, {}),
    ("data.prompt_key", " ", {}),
    ("data.reward_fn_key", "", {}),
    ("data.dataset_class", "a.b.C", {}),
    ("data.train", 3, {}),
    ("data.train", "a@2", {"data.dataset_class": "a:C"}),
    ("data.validation", "a@2", {}),
    ("evaluate.num_samples", 0, {}),
    ("evaluate.every_steps", -1, {}),
    ("cluster.num_engines", 0, {}),
    ("cluster.call_timeout_s", 0.0, {}),
    ("report.save_trees_every_steps", -1, {}),
    ("report.prometheus_port", 65536, {}),
    ("report.trace_destination", "grpc://collector:4317", {}),
    ("report.profile_steps", [0], {}),
]
LOWEST = {
    "rollout.branch.consecutive_penalty": 0.0,
    "rollout.branch.num_forks_per_decision": 0,
    "rollout.branch.initial_rollouts": 1,
    "rollout.branch.num_probe_tokens": 0,
    "rollout.group_size": 1,
    "rollout.max_tool_calls": 0,
    "tool.python.num_workers": 1,
    "tool.python.memory_limit_mib": 64,
    "tool.search.top_k": 1,
    "tool.web.max_calls_per_s": 0.0,
    "tool.cache.path": "",
    "tool.max_response_tokens": 16,
}
HIGHEST = {
    "rollout.branch.consecutive_penalty": 1.0,
    "rollout.top_p": 1.0,
    "rollout.min_finished_fraction": 0.5,
    "rollout.straggler_timeout_s": 1.0,
    "tool.search.top_k": 10,
    "tool.max_response_tokens": 40,
    "algo.ares.mode": "paper",
    "algo.ares.bootstrap": True,
    "algo.ares.skip_mastered": True,
}


DEFAULTS = OmegaConf.structured(TrainConfig)


def configured(settings):
    """Return the configuration with these values, whose ranges are checked."""
    config = copy.deepcopy(DEFAULTS)  # a hundredth of the time of making them
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    return OmegaConf.to_object(config)


@pytest.mark.parametrize(("key", "value", "others"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(key, value, others):
    error_key, got = refused_setting(configured, {**others, key: value})
    assert (error_key, repr(got)) == (key, repr(value))


@pytest.mark.parametrize("settings", [LOWEST, HIGHEST], ids=["lowest", "highest"])
def test_boundaries_are_valid(settings):
    assert isinstance(configured(settings), TrainConfig)


def test_a_wrong_type_and_an_unknown_key_are_refused():
    config = OmegaConf.structured(TrainConfig)
    wrong = {"optim.lr": "fast", "algo.kl_estimator": "k9", "weight_sync.transport": "carrier"}
    for key, value in wrong.items():
        with pytest.raises(ValidationError) as caught:
            OmegaConf.update(config, key, value)
        assert (caught.value.full_key, caught.value.value) == (key, value)
    with pytest.raises(ConfigAttributeError) as unknown:
        OmegaConf.update(config, "optim.lrr", 1.0)
    assert unknown.value.full_key == "optim.lrr"
