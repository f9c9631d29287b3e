"""The presets of algorithms, `configs/algo/NAME.yaml`."""

from functools import cache

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mega_agentrl.config.override_keys import known_groups
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig

PRESETS = known_groups(find_config_dir())["algo"]


@cache
def preset(name):
    """Return the configuration with a preset and defaults otherwise."""
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        composed = compose(overrides=[f"+algo={name}"])
    return OmegaConf.to_object(OmegaConf.merge(_defaults(), composed))


@cache
def _defaults():
    return OmegaConf.structured(TrainConfig)
