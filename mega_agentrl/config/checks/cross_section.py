"""Check conditions across sections of a configuration before a run starts.

Reads only file names and the model's `config.json`, no tokenizer and no data, so that it takes
milliseconds on a login node. Ranges of single settings are in the schema. The contents of data
files are checked by `data/`, free space and cluster health by the preflight.

Every error is a `ConfigError` with the key, its value, the expected value and a probable cause.

To add a check: put it into the module of its subject (`algo`, `inputs`, `library_options`,
`parallel`, `rollout`), call it here if it is a new function, and test it in `tests/config/checks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.checks.inputs import (
    check_bubblewrap,
    check_files,
    check_images,
    check_report,
    check_reward,
)
from mega_agentrl.config.checks.library_options import check_library_options
from mega_agentrl.config.checks.parallel import (
    check_colocation,
    check_lora,
    check_parallel_sizes,
    check_tree_attention,
    check_zero_mismatch,
    has_experts,
    has_images,
    read_model_config,
    read_model_size,
)
from mega_agentrl.config.checks.rollout import (
    check_agent,
    check_branching,
    check_groups,
    check_lengths,
    check_staleness,
)
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


def check_config(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition that `config` violates.

    `runtime.cluster` checks whether the cluster has room for all ranks.
    """
    check_files(config)
    if not config.model.path:
        raise ConfigError("model.path", "", "a Hugging Face folder", "the setting was left empty")
    model = read_model_config(Path(config.model.path))
    _check_reference(config, model)
    check_images(config, model)
    check_parallel_sizes(config, model)
    check_tree_attention(config, model)
    check_lora(config, model)
    check_zero_mismatch(config, model)
    check_lengths(config, read_model_size(config, model, "max_position_embeddings"))
    check_groups(config)
    check_branching(config)
    check_agent(config)
    if config.algo.needs_critic and (has_experts(model) or has_images(model)):
        trait = "has experts" if has_experts(model) else "sees images"
        raise ConfigError(
            "algo.advantage",
            config.algo.advantage,
            "an estimator without a critic (grpo and rloo need none), because the critic has the "
            f"architecture of model.path, which {trait}",
            "a preset of another model",
        )
    if config.reward.hosts_reward_model and has_images(model):
        raise ConfigError(
            "reward.model.path_or_url",
            config.reward.model.path_or_url,
            "an address (http://...) or none with a vision-language model: a hosted reward model "
            "is a text model and cannot read the images of a conversation",
            "a reward model for text",
        )
    if config.model.freeze_vision and not has_images(model):
        raise ConfigError(
            "model.freeze_vision",
            True,
            "False with a text model, which has no vision tower",
            "the settings of a vision-language model",
        )
    check_library_options(config)
    check_algo(config)
    check_staleness(config)
    check_colocation(config)
    check_reward(config)
    check_report(config.report)
    check_bubblewrap(config)


def _check_reference(config: TrainConfig, model: dict[str, Any]) -> None:
    """Check architecture and vocabulary; `runtime.inputs` compares all other sizes."""
    folder = config.model.reference_path
    if not folder:
        return
    if not config.algo.needs_reference:
        raise ConfigError(
            "model.reference_path",
            folder,
            "none with algo.kl_coef=0, which needs no reference",
            "only the KL term was switched off",
        )
    other = read_model_config(Path(folder), "model.reference_path")
    for name in ("architectures", "vocab_size"):
        if other.get(name) != model.get(name):
            raise ConfigError(
                "model.reference_path",
                folder,
                f"a model with {name}={model.get(name)} as in model.path",
                f"another model, its config.json has {name}={other.get(name)}",
            )
