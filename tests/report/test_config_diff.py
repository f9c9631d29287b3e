"""The settings of a run that differ from the defaults of the schema."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.errors import InputError
from mega_agentrl.report.config_diff import (
    NO_DEFAULT,
    UNSET,
    ConfigDifference,
    diff_configs,
    read_config,
    schema_defaults,
)


def test_the_defaults_have_no_differences(tmp_path):
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.structured(TrainConfig), path)
    assert diff_configs(read_config(path), schema_defaults()) == []


def test_differences_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "optim: {lr: 0.5, eps: 1.0}\nrollout:\n  branching: none\nresume: true\nname: ''\n"
        "old:\n  key: <b>\n  empty: {}\nlist: [2]\nseed: 1\n"
    )
    defaults = {"optim.lr": 1e-6, "optim.eps": 1, "rollout.branching": None, "resume": False}
    defaults |= {"name": float("inf"), "list": [2], "seed": 1}
    found = diff_configs(read_config(path), defaults)
    assert [(one.key, one.default, one.value) for one in found] == [
        ("optim.lr", "1e-06", "0.5"),
        ("rollout.branching", "null", "none"),
        ("resume", "false", "true"),
        ("name", "inf", "''"),
        ("old.key", NO_DEFAULT, "<b>"),
        ("old.empty", NO_DEFAULT, "{}"),
    ]


def test_an_entry_of_a_dictionary_has_no_default():
    config = {"algo.loss_options.tau": 0.5, "algo.kl_coef": 0.0}
    assert diff_configs(config, {"algo.loss_options": {}, "algo.kl_coef": 0.0}) == [
        ConfigDifference(key="algo.loss_options.tau", default=UNSET, value="0.5")
    ]


def test_a_missing_file_is_empty_and_one_without_a_configuration_is_refused(tmp_path):
    assert read_config(tmp_path / "none.yaml") == {}
    path = tmp_path / "config.yaml"
    path.write_text("- 1\n")
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert caught.value.name == str(path)
