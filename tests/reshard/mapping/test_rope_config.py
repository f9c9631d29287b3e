"""The rope's numbers in both spellings, and against transformers' own reading."""

import math

import pytest

from mega_agentrl.reshard.mapping.rope_config import RopeConfig, RopeType
from tests.tiny_models import LLAMA3_ROPE, YARN_ROPE


def read(**config):
    return RopeConfig.from_config({"max_position_embeddings": 128} | config, "config.json")


def old_spelling(rope, **changes):
    """The same settings as written before transformers 5."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} | changes
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def test_the_base_alone():
    assert read() == RopeConfig(theta=10000.0)
    assert read(rope_theta=5e5, rope_scaling=None) == RopeConfig(theta=5e5)
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).theta == 1e6


def test_llama3_by_hand_in_both_spellings():
    expected = RopeConfig(
        theta=10000.0,
        rope_type=RopeType.llama3,
        factor=4.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert read(rope_parameters=LLAMA3_ROPE) == expected
    assert read(**old_spelling(LLAMA3_ROPE)) == expected


def test_yarn_by_hand_in_both_spellings():
    new = read(rope_parameters=YARN_ROPE)
    assert (new.rope_type, new.factor, new.original_max_position_embeddings) == (
        RopeType.yarn,
        4.0,
        32,
    )
    assert (new.beta_fast, new.beta_slow, new.truncate) == (32.0, 1.0, True)
    assert new.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    old = old_spelling(YARN_ROPE, type="yarn")
    del old["rope_scaling"]["rope_type"]
    assert read(**old) == new


def test_linear():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}
    assert read(rope_parameters=rope) == RopeConfig(
        theta=1e4, rope_type=RopeType.linear, factor=2.0
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_attention_factor_of_yarn(given, expected):
    assert read(rope_parameters=YARN_ROPE | given).attention_factor == pytest.approx(expected)


def test_what_a_config_leaves_out_follows_from_its_positions():
    rope = {key: value for key, value in YARN_ROPE.items() if key != "factor"}
    assert read(rope_parameters=rope).factor == 4.0
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": None}
    assert read(rope_parameters=rope).original_max_position_embeddings == 128
    assert (
        read(
            rope_parameters=rope, original_max_position_embeddings=64
        ).original_max_position_embeddings
        == 64
    )


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE | {"beta_fast": 16, "mscale": 2.0}])
def test_transformers_reads_the_same(rope):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(max_position_embeddings=128, **old_spelling(rope))
    _, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    shape = RopeConfig.from_config(config.to_dict(), "config.json")
    assert shape.attention_factor == pytest.approx(attention_factor)
    theirs = config.rope_parameters
    assert (shape.theta, shape.factor) == (theirs["rope_theta"], theirs["factor"])
    assert shape.original_max_position_embeddings == theirs["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope', expected one of"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": YARN_ROPE | {"mrope_section": [1]}}, r"\['mrope_section'\]"),
        ({"rope_parameters": {"full_attention": YARN_ROPE}}, r"\['full_attention'\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, expected 1.0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing.*rope_type=linear"),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": None}}, "low_freq_factor is miss"),
    ],
)
def test_what_cannot_be_followed_is_refused(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(**config)
    assert "probable cause" in str(caught.value)
