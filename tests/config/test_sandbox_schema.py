"""The Python tool's settings: what is refused, and that the choices are what Hydra reads."""

import pytest

from mega_agentrl.config.choices import Isolation, PythonMode
from mega_agentrl.config.sandbox_schema import PythonToolConfig


def test_defaults_are_isolated_and_stateless():
    config = PythonToolConfig()
    assert config.isolation is Isolation.bubblewrap
    assert config.mode is PythonMode.stateless
    assert config.preload == ["numpy", "sympy", "pandas"]
    assert config.preload is not PythonToolConfig().preload


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hosts", -1),
        ("workers", 0),
        ("timeout_s", 0.0),
        ("memory_mib", 63),
    ],
)
def test_out_of_range_names_key_and_value(name, value):
    with pytest.raises(ValueError, match=rf"tool\.python\.{name}={value}: expected "):
        PythonToolConfig(**{name: value})


def test_least_values_are_taken():
    PythonToolConfig(workers=1, memory_mib=64)


def test_a_sandbox_may_hold_four_processes_at_their_limit():
    assert PythonToolConfig().total_memory_mib == 2048
    assert PythonToolConfig(memory_mib=64).total_memory_mib == 256


def test_hosts_are_off_unless_asked_for():
    assert PythonToolConfig().hosts == 0
