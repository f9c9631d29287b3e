"""Defaults and ranges of `tool.*`."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.sections.search import SearchToolConfig
from mega_agentrl.config.sections.tools import ToolConfig


def test_only_python_is_enabled_by_default():
    config = OmegaConf.to_object(OmegaConf.structured(ToolConfig))
    assert isinstance(config, ToolConfig)
    assert config.user_tools_file == ""
    assert not config.search.is_enabled
    assert not config.browse.is_enabled


def test_an_answer_has_room_for_every_document():
    search = SearchToolConfig(top_k=10)
    assert ToolConfig(max_response_tokens=40, search=search).max_response_tokens == 40
    with pytest.raises(
        ValueError, match=r"tool\.max_response_tokens=39: .* at least 40, .*top_k=10"
    ):
        ToolConfig(max_response_tokens=39, search=search)
    with pytest.raises(ValueError, match=r"tool\.max_response_tokens=15: expected at least 16"):
        ToolConfig(max_response_tokens=15)
