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
        ("cpu_s", 0.5),
        ("memory_mib", 63),
        ("output_chars", 15),
    ],
)
def test_out_of_range_names_key_and_value(name, value):
    with pytest.raises(ValueError, match=rf"tool\.python\.{name}={value}: expected "):
        PythonToolConfig(**{name: value})


def test_least_values_are_taken():
    PythonToolConfig(workers=1, cpu_s=1.0, memory_mib=64, output_chars=16)


def test_a_sandbox_may_hold_four_processes_at_their_limit():
    assert PythonToolConfig().total_memory_mib == 2048
    assert PythonToolConfig(memory_mib=64).total_memory_mib == 256


def test_hosts_are_off_unless_asked_for():
    assert PythonToolConfig().hosts == 0
    assert PythonToolConfig(hosts=2, host_resource="cpu_node").host_resource == "cpu_node"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hosts": 1, "host_resource": "CPU"}, "'CPU': expected a name of the cluster's own"),
        ({"hosts": 1, "host_resource": " x"}, "' x': expected a name of the cluster's own"),
        ({"host_resource": "x"}, "'x': expected tool.python.hosts above 0"),
    ],
)
def test_a_resource_that_no_host_can_take_is_named(values, expected):
    with pytest.raises(ValueError, match=rf"tool\.python\.host_resource={expected}"):
        PythonToolConfig(**values)
