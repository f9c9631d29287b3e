import pytest

from mega_agentrl.config.sandbox_schema import PythonToolConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [("workers", 0), ("timeout_s", 0.0), ("memory_mib", 63), ("output_chars", 15)],
)
def test_a_limit_out_of_range_is_named(key, value):
    with pytest.raises(ValueError, match=f"tool.python.{key}") as caught:
        PythonToolConfig(**{key: value})
    assert str(value) in str(caught.value)
