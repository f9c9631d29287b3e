"""The recipes compose, are valid, and say what was published."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from mega_agentrl.config.algorithm_traits import LOSSES
from mega_agentrl.config.enums import AresMode, Branching, FilterMetric, Truncation
from mega_agentrl.config.override_keys import register_schema
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig

pytestmark = pytest.mark.extended

GIVEN = ["data.train=a", "data.validation=b", "tool.search.source=http://search"]
FOLDER = Path(find_config_dir())
ALL = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))


def recipe(name, *overrides):
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        composed = compose("train", [f"experiment={name}", *overrides])
    if OmegaConf.is_missing(composed.model, "path"):
        composed.model.path = "/models/some"
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def loss_options(algo):
    """Return the values of all options of the loss, defaults included."""
    options = LOSSES.find(algo.loss).options
    return {name: option.default for name, option in options.items()} | algo.loss_options


@pytest.mark.parametrize("name", ALL)
def test_every_experiment_composes_into_valid_settings(name):
    config = recipe(name, *GIVEN)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert config.engine.max_model_len >= longest
    assert config.optim.micro_batch_tokens * config.parallel.context >= longest
    rows = config.data.prompts_per_step * config.rollout.group_size
    assert rows % (config.optim.num_minibatches * config.parallel.data) == 0


@pytest.mark.parametrize(
    ("name", "sizes", "lengths", "calls", "epochs"),
    [
        ("arpo_7b_reasoning", (16, 8, 128, 16), (1536, 4096), 3, 2),
        ("arpo_8b_deepsearch", (16, 8, 128, 16), (2000, 10000), 6, 5),
        ("arpo_14b_deepsearch", (12, 6, 64, 8), (2000, 6192), 6, 5),
    ],
)
def test_recipes_of_arpo_have_the_published_settings(name, sizes, lengths, calls, epochs):
    config = recipe(name, *GIVEN)
    rollout, data, algo, optim = config.rollout, config.data, config.algo, config.optim
    mini_batch = data.prompts_per_step // optim.num_minibatches
    assert sizes == (
        rollout.group_size,
        rollout.branch.initial_rollouts,
        data.prompts_per_step,
        mini_batch,
    )
    assert (data.max_prompt_tokens, rollout.max_response_tokens) == lengths
    assert (rollout.max_tool_calls, config.total_epochs) == (calls, epochs)
    assert (rollout.branch.alpha, rollout.branch.beta) == (0.5, 0.2)
    assert rollout.branch.num_forks_per_decision == 1
    assert rollout.branching is Branching.after_result
    assert loss_options(algo) == {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}
    assert algo.kl_coef == 0.0
    assert (optim.lr, optim.weight_decay, optim.grad_clip) == (1e-6, 0.01, 1.0)


def test_the_recipe_of_egpo_has_the_published_settings():
    config = recipe("egpo_qwen3_4b", *GIVEN)
    assert (config.total_epochs, config.optim.lr, config.algo.kl_coef) == (5, 1e-6, 0.001)
    assert (config.rollout.temperature, config.rollout.max_response_tokens) == (0.7, 8192)
    assert (config.algo.egpo.lam, config.algo.egpo.alpha) == (0.4, 2.0)
    assert config.reward.part_names == ("function_call",)


def test_the_recipe_of_ares_has_the_published_settings():
    config = recipe("ares_7b", *GIVEN)
    rollout, algo = config.rollout, config.algo
    assert (config.data.prompts_per_step, rollout.group_size) == (512, 8)
    assert config.data.prompts_per_step // config.optim.num_minibatches == 128
    assert (config.data.max_prompt_tokens, rollout.max_response_tokens) == (4096, 8192)
    assert (rollout.temperature, rollout.top_p) == (1.0, 0.99)
    assert loss_options(algo) == {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 3.0}
    assert algo.kl_coef == 0.01
    assert algo.ares.mode is AresMode.paper
    assert rollout.filter_metric is FilterMetric.accuracy
    assert rollout.filter_range == [0.01, 0.99]
    assert (config.total_epochs, config.evaluate.temperature) == (50, 0.5)
    assert (config.data.min_pixels, config.data.max_pixels) == (262144, 4194304)
    assert config.data.truncation is Truncation.drop
    assert not config.model.freeze_vision
