"""What a run set otherwise than the schema does."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.report.config_diff import (
    NO_DEFAULT,
    ConfigDifference,
    diff_configs,
    flatten_config,
    format_value,
    read_config,
    schema_defaults,
)


def test_the_defaults_differ_in_nothing(tmp_path):
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.structured(TrainConfig), path)
    assert diff_configs(read_config(path), schema_defaults()) == []


def test_what_was_set_and_what_is_gone(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("optim:\n  lr: 0.5\nrollout:\n  branching: none\nold:\n  key: <b>\nseed: 1\n")
    defaults = {"optim.lr": 1e-6, "rollout.branching": "aepo", "seed": 1}
    assert diff_configs(read_config(path), defaults) == [
        ConfigDifference(key="optim.lr", default="1e-06", value="0.5"),
        ConfigDifference(key="rollout.branching", default="aepo", value="none"),
        ConfigDifference(key="old.key", default=NO_DEFAULT, value="<b>"),
    ]


def test_no_file_and_no_configuration(tmp_path):
    assert read_config(tmp_path / "none.yaml") == {}
    path = tmp_path / "config.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match=r"config.yaml: got list without a key"):
        read_config(path)


def test_values_are_compared_as_they_are_read():
    assert format_value(1.0) == format_value(1) == "1"
    assert [format_value(one) for one in (True, None, "", 1e-6, float("inf"))] == [
        "true",
        "null",
        "''",
        "1e-06",
        "inf",
    ]


def test_flattening_keeps_empty_groups():
    assert flatten_config({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {
        "a.b.c": 1,
        "a.d": {},
        "e": [2],
    }
