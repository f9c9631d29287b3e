"""Ranges of the tools' settings."""

import pytest

from mega_agentrl.config.tool_schema import ToolConfig


def test_by_default_there_are_no_tools_of_ones_own():
    assert ToolConfig().file == ""
    assert ToolConfig().lifecycle_timeout_s == 60


@pytest.mark.parametrize("key", ["lifecycle_timeout_s", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_limits_are_positive(key, value):
    with pytest.raises(ValueError, match=rf"tool\.{key}={value}: expected above 0"):
        ToolConfig(**{key: value})
