"""Rotary settings by hand, in both spellings."""

import math

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.rope_config import RopeConfig, RopeType
from tests.tiny_models import LLAMA3_ROPE, YARN_ROPE


def read(**config):
    return RopeConfig.from_config({"max_position_embeddings": 128} | config, "config.json")


def old_spelling(rope, type_key="rope_type"):
    """The same settings as written before transformers 5."""
    scaling = {key: rope[key] for key in rope.keys() - {"rope_theta", "rope_type"}}
    scaling[type_key] = rope["rope_type"]
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}
LLAMA3 = RopeConfig(
    theta=10000.0,
    rope_type=RopeType.llama3,
    factor=4.0,
    original_max_position_embeddings=32,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeConfig(
    theta=10000.0,
    rope_type=RopeType.yarn,
    factor=4.0,
    original_max_position_embeddings=32,
    attention_factor=0.1 * math.log(4) + 1,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(theta=1e6)),
        (
            {"rope_parameters": LINEAR_ROPE},
            RopeConfig(theta=1e4, rope_type=RopeType.linear, factor=2.0),
        ),
        ({"rope_parameters": LLAMA3_ROPE}, LLAMA3),
        (old_spelling(LLAMA3_ROPE), LLAMA3),
        ({"rope_parameters": YARN_ROPE}, YARN),
        (old_spelling(YARN_ROPE, "type"), YARN),
    ],
    ids=["none", "theta", "default", "linear", "llama3", "old-llama3", "yarn", "old-yarn"],
)
def test_settings_are_read_in_both_spellings(config, expected):
    assert read(**config) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
    ids=["given", "two-scales", "one-scale", "no-scaling"],
)
def test_the_attention_factor_of_yarn_follows_from_its_settings(given, expected):
    assert read(rope_parameters=YARN_ROPE | given).attention_factor == pytest.approx(expected)


def test_keys_that_a_config_leaves_out_follow_from_its_positions():
    rope = {key: value for key, value in YARN_ROPE.items() if key != "factor"}
    assert read(rope_parameters=rope).factor == 4.0
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": None}
    for config, positions in (({}, 128), ({"original_max_position_embeddings": 64}, 64)):
        found = read(rope_parameters=rope, **config)
        assert found.original_max_position_embeddings == positions


UNKNOWN_KEYS = "unknown keys in the rope settings"


@pytest.mark.parametrize(
    ("config", "name", "got"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type", "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type", "dynamic"),
        (
            {"rope_parameters": YARN_ROPE | {"mrope_section": [1]}},
            UNKNOWN_KEYS,
            ["mrope_section"],
        ),
        (
            {"rope_parameters": {"full_attention": YARN_ROPE}},
            UNKNOWN_KEYS,
            ["full_attention"],
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor", None),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": None}}, "low_freq_factor", None),
    ],
    ids=["type", "old-type", "key", "by-layer", "partial", "no-factor", "no-low-factor"],
)
def test_settings_that_are_not_supported_are_refused(config, name, got):
    with pytest.raises(InputError) as caught:
        read(**config)
    assert caught.value.name.endswith(f", {name}")
    assert caught.value.got == got
