"""Defaults and ranges of `tool.python.*`."""

import pytest

from mega_agentrl.config.enums import PythonMode, SandboxIsolation
from mega_agentrl.config.sections.sandbox import PythonToolConfig


def test_defaults_are_isolated_and_stateless():
    config = PythonToolConfig()
    assert config.isolation is SandboxIsolation.bubblewrap
    assert config.mode is PythonMode.stateless
    assert config.preload_modules == ["numpy", "sympy", "pandas"]
    assert config.preload_modules is not PythonToolConfig().preload_modules


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hosts", -1),
        ("num_workers", 0),
        ("timeout_s", 0.0),
        ("memory_limit_mib", 63),
    ],
)
def test_out_of_range_names_key_and_value(name, value):
    with pytest.raises(ValueError, match=rf"tool\.python\.{name}={value}: expected "):
        PythonToolConfig(**{name: value})


def test_minimum_values_pass():
    PythonToolConfig(num_workers=1, memory_limit_mib=64)


def test_a_sandbox_may_use_four_times_the_process_limit():
    assert PythonToolConfig().total_memory_mib == 2048
    assert PythonToolConfig(memory_limit_mib=64).total_memory_mib == 256


def test_sandbox_hosts_are_off_by_default():
    assert PythonToolConfig().num_hosts == 0
