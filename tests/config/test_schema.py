"""Every setting is read by the code and has a checked range; their number is limited."""

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ValidationError

from mega_agentrl.algo.policy_loss import LOSSES
from mega_agentrl.config import schema, sections
from mega_agentrl.config.override_keys import known_keys
from mega_agentrl.config.schema import TrainConfig
from tests.config.refusals import refused_setting

PACKAGE = Path(schema.__file__).resolve().parents[1]
MODULES = [
    schema,
    *(
        importlib.import_module(f"{sections.__name__}.{info.name}")
        for info in pkgutil.iter_modules(sections.__path__)
    ),
]
SECTIONS = [
    kind
    for module in MODULES
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
]


def attributes_of(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def attributes_read() -> set[str]:
    """Names read as attributes anywhere in the package outside `config/`.

    A property of the schema that is read there counts as reading its fields, and a registered loss
    reads its options.
    """
    names = {option for loss in LOSSES.values() for option in loss.options}
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


def test_every_leaf_is_read_outside_config():
    read = attributes_read()
    unread = [key for key in known_keys() if key.rsplit(".", maxsplit=1)[-1] not in read]
    assert not unread, f"settings that nothing reads: {', '.join(unread)}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_section_has_a_docstring(section):
    assert section.__doc__
    assert not section.__doc__.startswith(f"{section.__name__}(")


def test_the_defaults_are_a_valid_configuration_and_plain_values():
    config = OmegaConf.to_object(OmegaConf.structured(TrainConfig))
    assert isinstance(config, TrainConfig)
    json.dumps(dataclasses.asdict(config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tensor", 0),
        ("engine.tensor_parallel_size", 0),
        ("engine.max_model_len", 8),
        ("engine.gpu_memory_utilization", 1.0),
        ("rollout.group_size", 0),
        ("rollout.temperature", 0.0),
        ("rollout.top_p", 0.0),
        ("rollout.max_tool_calls", -1),
        ("rollout.trajectory_timeout_s", -1.0),
        ("rollout.trajectory_timeout_s", float("inf")),
        ("rollout.branch.num_probe_tokens", -1),
        ("rollout.branch.num_forks_per_decision", -1),
        ("tool.python.timeout_s", 0.0),
        ("tool.search.top_k", 0),
        ("algo.clip_low", 1.5),
        ("algo.clip_high", 0.0),
        ("algo.clip_dual", 1.0),
        ("algo.kl_coef", -0.1),
        ("optim.lr", -1.0),
        ("optim.grad_clip", 0.0),
        ("sft.max_steps", -1),
        ("sft.target_success_rate", 1.5),
        ("data.prompts_per_step", 0),
        ("evaluate.num_samples", 0),
        ("evaluate.every_steps", -1),
        ("cluster.call_timeout_s", 0.0),
        ("report.save_trees_every_steps", -1),
        ("report.prometheus_port", 65536),
        ("report.trace_destination", "grpc://collector:4317"),
        ("report.profile_steps", [0]),
        ("cluster.num_engines", 0),
        ("total_steps", -1),
        ("save_every_steps", -1),
    ],
)
def test_values_out_of_range_name_their_key_and_value(key, value):
    config = OmegaConf.structured(TrainConfig)
    OmegaConf.update(config, key, value)
    assert refused_setting(OmegaConf.to_object, config) == (key, value)


def test_a_wrong_type_and_an_unknown_key_fail():
    config = OmegaConf.structured(TrainConfig)
    with pytest.raises(ValidationError, match="learning"):
        OmegaConf.update(config, "optim.lr", "learning")
    with pytest.raises(ValidationError, match="k9"):
        OmegaConf.update(config, "algo.kl_estimator", "k9")
    with pytest.raises(ValidationError, match="carrier"):
        OmegaConf.update(config, "weight_sync.transport", "carrier")
    with pytest.raises(ConfigAttributeError, match="lrr"):
        OmegaConf.update(config, "optim.lrr", 1.0)
